"""For which row counts a stage has graphs, what they take, and which of them can go."""

from dataclasses import dataclass, replace
from typing import Self

from engine.plan.costs import Costs

PROMPT_TAIL_ROWS = 256
"""Chunks of up to so many rows are captured too."""


def captured_rows(most: int) -> tuple[int, ...]:
    """Powers of two up to the first that is no less than `most`."""
    return tuple(1 << power for power in range((most - 1).bit_length() + 1))


@dataclass(frozen=True, slots=True)
class GraphKeys:
    """Row counts, ascending. The sample belongs to the last stage: elsewhere it has none.

    A step of fewer rows than any key is padded up to the next one, so every key but the largest can be done without.
    """

    forward: tuple[int, ...]
    sample: tuple[int, ...]

    @classmethod
    def of(cls, max_batch: int, *, samples: bool, few: bool = False) -> Self:
        """All that a stage captures; the largest alone where there are to be few."""
        decode, tails = captured_rows(max_batch), captured_rows(PROMPT_TAIL_ROWS)
        keys = cls(tuple(sorted({*decode, *tails})), decode if samples else ())
        return replace(keys, forward=keys.forward[-1:], sample=keys.sample[-1:]) if few else keys

    def nbytes(self, costs: Costs, layers: int) -> int:
        """What they take on a stage of so many layers."""
        nodes = len(self.forward) * layers * costs.nodes_per_layer + len(self.sample) * costs.nodes_per_sample
        return nodes * costs.graph_node

    def halved(self) -> Self:
        """Every second one, the largest among them: no step is padded further than to what was the next key."""
        return replace(self, forward=self.forward[::-2][::-1], sample=self.sample[::-2][::-1])
