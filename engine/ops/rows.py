"""What one forward computes: rows, each one token of one sequence, with the places of their sequences' KV."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Span(NamedTuple):
    """Consecutive tokens of one sequence from position `start` on; `blocks` hold its KV, these tokens' included."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of several spans, one after the other. All arrays int64.

    tokens, positions, sequences [rows]: id, place in its sequence, and span of each row; spans [n, 3]: first row, rows,
    position of the first; tables [n, blocks]: block b of a span holds its positions 64 b to 64 b + 63.
    """

    tokens: Ints
    positions: Ints
    sequences: Ints
    spans: Ints
    tables: Ints

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Self:
        counts = [len(span.tokens) for span in spans]
        starts = [span.start for span in spans]
        first = np.cumsum([0, *counts])
        tables = np.zeros((len(spans), max(len(span.blocks) for span in spans)), np.int64)
        for table, span in zip(tables, spans, strict=True):
            table[: len(span.blocks)] = span.blocks
        return cls(
            tokens=np.array([token for span in spans for token in span.tokens], np.int64),
            positions=np.concatenate([np.arange(span.start, span.start + len(span.tokens)) for span in spans]),
            sequences=np.repeat(np.arange(len(spans)), counts),
            spans=np.stack([first[:-1], np.array(counts), np.array(starts)], axis=1),
            tables=tables,
        )

    def __len__(self) -> int:
        return len(self.tokens)
