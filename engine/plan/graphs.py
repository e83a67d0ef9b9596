"""For which row counts a stage has graphs, what they take, and which of them can go."""

from typing import NamedTuple, Self

from engine.plan.costs import Costs
from engine.plan.scratch import GROUP_ROWS, PROMPT_TAIL_ROWS


def captured_rows(most: int) -> tuple[int, ...]:
    """Powers of two up to the first that is no less than `most`."""
    return tuple(1 << power for power in range((most - 1).bit_length() + 1))


class GraphKeys(NamedTuple):
    """Row counts, ascending: of decode forwards, of the tails of prompts, and of samples. The sample belongs to the
    last stage: elsewhere it has none.

    Fewer rows than any key are padded up to the next one, so every key but the largest can be done without.
    """

    decode: tuple[int, ...]
    tail: tuple[int, ...]
    sample: tuple[int, ...]

    @classmethod
    def of(cls, max_batch: int, *, samples: bool, few: bool = False) -> Self:
        """All that a stage captures; the largest alone where there are to be few."""
        decode = captured_rows(min(max_batch, GROUP_ROWS))
        keys = cls(decode, captured_rows(PROMPT_TAIL_ROWS)[3:], decode if samples else ())
        return cls(*(rows[-1:] for rows in keys)) if few else keys

    def nbytes(self, costs: Costs, layers: int) -> int:
        """What they take on a stage of so many layers."""
        forwards = len(self.decode) + len(self.tail)
        nodes = forwards * layers * costs.nodes_per_layer + len(self.sample) * costs.nodes_per_sample
        return nodes * costs.graph_node

    def halved(self) -> Self:
        """Every second one, the largest among them: no step is padded further than to what was the next key."""
        return type(self)(*(rows[::-2][::-1] for rows in self))
