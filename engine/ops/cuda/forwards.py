"""A step's plan cut into forwards, each with the rows that are sampled after it. Pure: what goes where, as numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.plan.scratch import GROUP_ROWS
from engine.sequence import StepPlan

Ints = npt.NDArray[np.int32]
FROM_DEVICE = -1
"""In place of a token: the one that its slot's last sample drew."""
PADDING = -1
"""In place of a position, or of a slot to sample."""


@dataclass(slots=True)
class Forward:
    """Rows of one forward. `sampled`: (row, slot, index of the token to draw)."""

    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    one_sequence: bool
    sampled: list[tuple[int, int, int]] = field(default_factory=list)

    def write(self, to: Ints) -> None:
        """Into int32 [3, rows]: tokens, positions, slots, padded."""
        count = len(self.tokens)
        to[:, :count] = self.tokens, self.positions, self.slots
        to[:, count:] = [[0], [PADDING], [self.slots[0]]]

    def write_sampled(self, to: Ints) -> None:
        """Into int32 [3, rows]: rows of the forward, slots, indices, padded."""
        count = len(self.sampled)
        to[:, :count] = np.array(self.sampled, np.int32).T
        to[:, count:] = [[0], [PADDING], [0]]


def forwards(plan: StepPlan) -> Iterator[Forward]:
    """Decode rows, GROUP_ROWS at a time, then the chunk; rows to sample in the order of the plan."""
    for first in range(0, len(plan.decode), GROUP_ROWS):
        rows = plan.decode[first : first + GROUP_ROWS]
        yield Forward(
            [FROM_DEVICE] * len(rows),
            [row.position for row in rows],
            [row.slot for row in rows],
            one_sequence=False,
            sampled=[(place, row.slot, row.generated_index) for place, row in enumerate(rows)],
        )
    if (chunk := plan.prefill) is not None:
        count = len(chunk.tokens)
        yield Forward(
            chunk.tokens,
            range(chunk.start, chunk.start + count),
            [chunk.slot] * count,
            one_sequence=True,
            sampled=[(count - 1, chunk.slot, chunk.generated_index)] if chunk.completes else [],
        )
