"""One ask becomes one arrangement: context, split, pool, and every card's bytes; whether it fits, not how to mend it.

Order: the context, then the split by the reserves of all cards alike, then the reserve of later cards, then the pool
out of all room above the reserves. A pool has each block on every stage, so its size is that of the tightest card; what
others have beyond it stays free.
"""

from dataclasses import dataclass, replace

from engine.config import BLOCK_TOKENS
from engine.errors import ConfigError
from engine.memory.owners import CHARGED, Owner
from engine.plan.ask import Ask
from engine.plan.costs import COSTS, MIB, Costs
from engine.plan.demand import Demand
from engine.plan.layout import Arithmetic, blocks_for
from engine.plan.split import Split, balance, can_split, whole_split

SMALL_CONTEXT = 2048
"""A context chosen for the user is no shorter for the sake of a reserve: then the card is LOW, which says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    """Bytes of one card once everything is loaded: total = reserved + other + owners + room."""

    device: int
    total: int
    reserved: int
    """The driver's own."""
    other: int
    """Of other processes."""
    layers: tuple[tuple[int, int], ...]
    """(first, after the last) of each stage on it."""
    owners: dict[Owner, int]
    reserve: int
    """What is to stay free."""
    room: int
    """What does stay free; negative where it does not fit."""
    kv_minimum: int
    """Part of the KV cache that is never given back."""
    largest_late: int
    """The largest allocation that may come after ready: the workspace, made anew after a trim."""
    mend: str | None = None

    @property
    def low(self) -> bool:
        return self.room < self.reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an engine would hold. `fits` is whether it can be loaded at all; a card that is `low` still can."""

    cards: tuple[CardPlan, ...]
    split: Split
    max_context: int
    kv_dtype: str
    kv_blocks: int
    kv_minimum_blocks: int
    kv_group_blocks: int
    """Blocks whose memory comes and goes together."""
    pool_short: bool = False
    """The pool that was asked for does not hold one sequence of `max_context`."""
    changes: tuple[str, ...] = ()
    """Where it does not fit, or is low: up to two changes of flags, the cheapest first, each of which was tried."""
    later: "LaterCost | None" = None

    @property
    def fits(self) -> bool:
        return not self.pool_short and all(card.room >= 0 for card in self.cards)

    @property
    def low(self) -> bool:
        return any(card.low for card in self.cards)

    @property
    def sound(self) -> bool:
        return self.fits and not self.low


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterCost:
    """What `--vram-reserve-later-mib` costs, against the same plan without it."""

    context_before: int
    split_before: Split
    kv_lost: tuple[int, ...]
    """Bytes of KV cache by card; negative where layers moved away from it."""
    blocks_lost: int


def arrange(needs: Demand, ask: Ask, costs: Costs = COSTS) -> Plan:
    """Raises ConfigError for a context beyond what was trained, or a split or stages that the model does not have."""
    arithmetic = Arithmetic(needs, ask, costs)
    if ask.max_context is not None and ask.max_context > needs.trained_context:
        raise ConfigError(f"--max-context {ask.max_context}: the model was trained for {needs.trained_context} tokens")
    if arithmetic.n_stages > needs.n_layers:
        raise ConfigError(f"{arithmetic.n_stages} stages for a model of {needs.n_layers} layers: use fewer devices")
    if ask.max_context is not None:
        return _fill(arithmetic, ask.max_context, _choose_split(arithmetic, ask.max_context))
    return _fill(arithmetic, *_choose_both(arithmetic))


def _choose_both(arithmetic: Arithmetic) -> tuple[int, Split]:
    """The longest context that leaves every reserve whole, and its split.

    Later reserves shorten the context before they move layers.
    """
    ask = arithmetic.ask
    if ask.reserve_later_mib is not None:
        alike = replace(arithmetic, ask=replace(ask, reserve_later_mib=None))
        most, split = _choose_both(alike)
        kept = replace(arithmetic, ask=replace(ask, layer_split=split))
        context = longest_context(kept, arithmetic.needs.trained_context, ask.reserves())
        if context >= min(most, SMALL_CONTEXT):
            return context, split
    context = _choose_context(arithmetic)
    return context, _choose_split(arithmetic, context)


def _choose_context(arithmetic: Arithmetic) -> int:
    """The longest that leaves every reserve whole with some split; a short one may eat into them."""
    trained = arithmetic.needs.trained_context
    nothing = [0] * len(arithmetic.ask.cards)
    safe = longest_context(arithmetic, trained, arithmetic.ask.reserves())
    short = min(trained, SMALL_CONTEXT)
    return max(safe, longest_context(arithmetic, short, nothing) if safe < short else 0, min(trained, BLOCK_TOKENS))


def longest_context(arithmetic: Arithmetic, most: int, reserves: list[int]) -> int:
    """The longest context up to `most` for which some allowed split has room; 0 if there is none."""
    least_blocks, most_blocks = 0, blocks_for(most)
    while least_blocks < most_blocks:
        middle = (least_blocks + most_blocks + 1) // 2
        if _goes(arithmetic, min(most, middle * BLOCK_TOKENS), reserves):
            least_blocks = middle
        else:
            most_blocks = middle - 1
    return min(most, least_blocks * BLOCK_TOKENS)


def _goes(arithmetic: Arithmetic, context: int, reserves: list[int]) -> bool:
    ask, n_layers, n_stages = arithmetic.ask, arithmetic.needs.n_layers, arithmetic.n_stages
    if ask.kv_pool_mib is not None:
        # As if all layers were on one card; each further stage may round up by a granule more.
        whole = arithmetic.kv(n_layers).pool_bytes(blocks_for(context)) + (n_stages - 1) * arithmetic.costs.granule
        if whole > ask.kv_pool_mib * MIB:
            return False
    if ask.layer_split is None:
        return can_split(n_layers, n_stages, arithmetic.room(context, reserves))
    return min(arithmetic.card_rooms(context, reserves, whole_split(ask.layer_split, n_layers, n_stages))) >= 0


def _choose_split(arithmetic: Arithmetic, context: int) -> Split:
    """Balanced by the reserves that are the same for all; later reserves move layers only when nothing else fits."""
    ask, n_layers, n_stages = arithmetic.ask, arithmetic.needs.n_layers, arithmetic.n_stages
    if ask.layer_split is not None:
        return whole_split(ask.layer_split, n_layers, n_stages)
    reserves, nothing = ask.reserves(), [0] * len(ask.cards)
    tried = [balance(n_layers, n_stages, arithmetic.room(context, ask.reserves(later=False)))]
    for left in (reserves, nothing):  # with the reserves whole, or else at least loadable
        if not any(min(arithmetic.card_rooms(context, left, split)) >= 0 for split in tried):
            tried.append(balance(n_layers, n_stages, arithmetic.room(context, left)))
        for split in tried:
            if min(arithmetic.card_rooms(context, left, split)) >= 0:
                return split
    return tried[-1]


def _fill(arithmetic: Arithmetic, context: int, split: Split) -> Plan:
    ask = arithmetic.ask
    reserves = ask.reserves()
    owners = [_fixed(arithmetic, position, split) for position in range(len(ask.cards))]
    minimum = blocks_for(context)
    least = [arithmetic.kv_bytes(position, split, minimum) for position in range(len(ask.cards))]
    budgets = [
        card.free - sum(held.values()) - reserve
        for card, held, reserve in zip(ask.cards, owners, reserves, strict=True)
    ]
    if ask.shadow:
        for position, held in enumerate(owners):
            held[Owner.SHADOW] = arithmetic.shadow(position, split, (budgets[position] - least[position]) // 2)
            budgets[position] -= held[Owner.SHADOW]
    blocks, short = _pool(arithmetic, split, minimum, budgets)
    for position, held in enumerate(owners):
        held[Owner.KV_CACHE] = arithmetic.kv_bytes(position, split, blocks)
    cards = tuple(
        CardPlan(
            device=card.device,
            total=card.total,
            reserved=card.reserved,
            other=card.other,
            layers=tuple((first, end) for _, first, end in arithmetic.stages_on(position, split)),
            owners=held,
            reserve=reserves[position],
            room=card.free - sum(held.values()),
            kv_minimum=least[position],
            largest_late=arithmetic.costs.cublas_workspace,
        )
        for position, (card, held) in enumerate(zip(ask.cards, owners, strict=True))
    )
    return Plan(
        cards=cards,
        split=split,
        max_context=context,
        kv_dtype=ask.kv_dtype,
        kv_blocks=blocks,
        kv_minimum_blocks=minimum,
        kv_group_blocks=arithmetic.kv(1).coarse(blocks).group_blocks,
        pool_short=short,
    )


def _fixed(arithmetic: Arithmetic, position: int, split: Split) -> dict[Owner, int]:
    """One card's owners but for its K and V."""
    owners = dict.fromkeys(CHARGED, 0)
    owners[Owner.CONTEXT] = arithmetic.costs.context
    owners[Owner.MODULES] = arithmetic.costs.modules
    for stage in arithmetic.stages_on(position, split):
        for owner, size in arithmetic.stage(*stage).items():
            owners[owner] += size
    return owners


def _pool(arithmetic: Arithmetic, split: Split, minimum: int, budgets: list[int]) -> tuple[int, bool]:
    """(blocks, whether that is more than the user allows)."""
    if arithmetic.ask.kv_pool_mib is None:
        return max(minimum, arithmetic.most_blocks(split, budgets)), False
    blocks = arithmetic.most_blocks_in_all(split, arithmetic.ask.kv_pool_mib * MIB)
    return max(minimum, blocks), blocks < minimum
