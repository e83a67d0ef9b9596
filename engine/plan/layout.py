"""The arithmetic of one arrangement: a context, a split, and what every card then holds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from engine.config import BLOCK_TOKENS
from engine.kv_cache.geometry import KvGeometry
from engine.memory.owners import Owner
from engine.plan.ask import Ask
from engine.plan.costs import Costs
from engine.plan.demand import Demand
from engine.plan.graphs import GraphKeys
from engine.plan.scratch import stage_rows
from engine.plan.split import Room, Split, bounds, rooms

Stage = tuple[int, int, int]
"""(stage, first layer, layer after its last)"""


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class Arithmetic:
    """What stages take, for one model on one set of cards. Bytes, in whole granules as cards give them."""

    needs: Demand
    ask: Ask
    costs: Costs
    _sums: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sums", list(accumulate(self.needs.layer_weights, initial=0)))

    @property
    def n_stages(self) -> int:
        return len(self.ask.stages)

    @property
    def per_card(self) -> int:
        """What a card costs however many stages are on it."""
        return self.costs.context + self.costs.modules

    def stages_on(self, position: int, split: Split) -> list[Stage]:
        on = [stage for stage, card in enumerate(self.ask.stages) if card == position]
        return [(stage, *bounds(split)[stage]) for stage in on]

    def weights(self, stage: int, first: int, end: int) -> int:
        needs, last = self.needs, stage == self.n_stages - 1
        size = self._sums[end] - self._sums[first] + needs.every_stage
        if stage == 0:
            size += needs.embedding
        if last:
            size += needs.head + (needs.head_shared if stage else 0)
        return self.costs.granules(size)

    def scratch(self, stage: int) -> int:
        logits = self.needs.logit_scratch if stage == self.n_stages - 1 else 0
        rows = stage_rows(self.ask.prefill_rows)
        return self.costs.granules(rows * self.needs.row_scratch + self.needs.stage_scratch + logits)

    def graphs(self, stage: int, layers: int) -> int:
        samples = stage == self.n_stages - 1
        keys = GraphKeys.of(self.ask.max_batch, samples=samples, few=self.ask.few_graphs)
        return self.costs.granules(keys.nbytes(self.costs, layers))

    def kv(self, layers: int) -> KvGeometry:
        needs = self.needs
        return KvGeometry(layers, needs.kv_heads, needs.head_dim, self.ask.kv_dtype, granule=self.costs.granule)

    def stage(self, stage: int, first: int, end: int) -> dict[Owner, int]:
        """What one stage takes but for its K and V."""
        return {
            Owner.WEIGHTS: self.weights(stage, first, end),
            Owner.SCRATCH: self.scratch(stage),
            Owner.CUBLAS_WORKSPACE: self.costs.cublas_workspace,
            Owner.CUDA_GRAPHS: self.graphs(stage, end - first),
        }

    def room(self, context: int, reserves: list[int]) -> Room:
        """What is left above the reserve of a stage's card with K and V for one sequence of `context` tokens.

        Stages on one card share it equally.
        """
        blocks = blocks_for(context)
        shares = []
        for position in self.ask.stages:
            free = self.ask.cards[position].free - self.per_card - reserves[position]
            shares.append(free // self.ask.stages.count(position))
        fixed = [self.scratch(stage) + self.costs.cublas_workspace for stage in range(self.n_stages)]
        by_layers = [self.kv(layers).pool_bytes(blocks) for layers in range(self.needs.n_layers + 1)]

        def room(stage: int, first: int, end: int) -> int:
            layers = end - first
            needed = self.weights(stage, first, end) + self.graphs(stage, layers) + by_layers[layers]
            return shares[stage] - fixed[stage] - needed

        return room

    def card_rooms(self, context: int, reserves: list[int], split: Split) -> list[int]:
        """What is left above the reserve of each card with K and V for one sequence of `context` tokens."""
        room = self.room(context, reserves)
        left = [0] * len(self.ask.cards)
        for position, size in zip(self.ask.stages, rooms(split, room), strict=True):
            left[position] += size
        return left

    def kv_bytes(self, position: int, split: Split, blocks: int) -> int:
        """K and V of a pool of so many blocks on one card."""
        return sum(self.kv(end - first).pool_bytes(blocks) for _, first, end in self.stages_on(position, split))

    def pool_bytes(self, split: Split, blocks: int) -> int:
        """On all cards together."""
        return sum(self.kv_bytes(position, split, blocks) for position in range(len(self.ask.cards)))

    def most_blocks(self, split: Split, budgets: list[int]) -> int:
        """The largest pool that takes no more than its budget on any card."""

        def goes(blocks: int) -> bool:
            return all(self.kv_bytes(card, split, blocks) <= budget for card, budget in enumerate(budgets))

        return _last(goes, max(0, min(budgets)) // self.kv(1).run_bytes)

    def most_blocks_in_all(self, split: Split, budget: int) -> int:
        """The largest pool that takes no more than this on all cards together."""
        return _last(lambda blocks: self.pool_bytes(split, blocks) <= budget, budget // self.kv(1).run_bytes)

    def shadow(self, position: int, split: Split, budget: int) -> int:
        """An f16 copy of as many layers of a card as go into the budget; the others do without."""
        shadows = self.needs.layer_shadow
        layers = [size for _, first, end in self.stages_on(position, split) for size in shadows[first:end]]
        sums = [self.costs.granules(size) for size in accumulate(layers, initial=0)]
        return max((size for size in sums if size <= budget), default=0)


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which something holds that holds for all smaller ones; 0 if there is none."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        if holds(middle):
            least = middle
        else:
            most = middle - 1
    return least
