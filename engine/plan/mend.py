"""What the user could change so that a plan fits and leaves every reserve whole: found by planning again, not guessed.

A change is one or more flags with their figures. Its cost is the share of what was asked for that it gives up: nothing
for another split, the lost part of the context, of the pool or of the reserve for a smaller one, a fixed figure for
narrower K and V, and a little for each flag beyond the first. Only changes that were planned through and came out sound
are named.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from engine.config import BLOCK_TOKENS
from engine.kv_cache.storage import KvDtype
from engine.memory.owners import Owner
from engine.plan.arrange import LaterCost, Plan, arrange, longest_context
from engine.plan.ask import Ask
from engine.plan.costs import COSTS, MIB, Costs
from engine.plan.demand import Demand
from engine.plan.layout import Arithmetic, blocks_for
from engine.plan.sizes import mib_down, mib_up

NARROWER: dict[KvDtype, tuple[KvDtype, ...]] = {"f32": ("f16", "int8"), "f16": ("int8",), "int8": ()}
NARROWING_COST = {"f16": 0.05, "int8": 0.25}
FURTHER_FLAG_COST = 0.1
MOST_CHANGES = 2


@dataclass(frozen=True, slots=True)
class Change:
    """Flags with figures that make a sound plan; `cost` as above."""

    flags: dict[str, str]
    cost: float

    def __str__(self) -> str:
        return " ".join(f"{flag} {figure}" for flag, figure in self.flags.items())


def plan_cards(needs: Demand, ask: Ask, costs: Costs = COSTS) -> Plan:
    """The plan for these cards, with what it costs to keep later reserves, and with changes where it is not sound.

    Raises ConfigError for settings that contradict the model or the cards.
    """
    plan = arrange(needs, ask, costs)
    if ask.reserve_later_mib is not None:
        plan = replace(plan, later=_later_cost(needs, ask, costs, plan))
    if plan.sound:
        return plan
    changes = tuple(str(change) for change in cheapest_changes(needs, ask, costs, plan))
    mend = (changes[0] if plan.fits else " or ".join(changes)) if changes else _nothing_helps(needs, ask, costs)
    cards = tuple(replace(card, mend=mend) if card.low or plan.pool_short else card for card in plan.cards)
    return replace(plan, changes=changes, cards=cards)


def cheapest_changes(needs: Demand, ask: Ask, costs: Costs, plan: Plan) -> list[Change]:
    """Up to two changes, none of which contains the other."""
    chosen: list[Change] = []
    for change in sorted(
        _changes(needs, ask, costs, plan), key=lambda change: (round(change.cost, 2), len(change.flags))
    ):
        if not any(other.flags.items() <= change.flags.items() for other in chosen):
            chosen.append(change)
        if len(chosen) == MOST_CHANGES:
            break
    return chosen


def _changes(needs: Demand, ask: Ask, costs: Costs, plan: Plan) -> Iterator[Change]:
    """Every combination of another split, narrower K and V and another pool, alone and with less of what can be made as
    small as need be: the context, the reserve, or both.
    """
    splits = [False] if ask.layer_split is None else [False, True]
    dtypes = [ask.kv_dtype, *NARROWER[ask.kv_dtype]]
    pools = [False] if ask.kv_pool_mib is None else [False, True]
    for free_split, dtype, free_pool in product(splits, dtypes, pools):
        tried = replace(
            ask,
            max_context=plan.max_context,
            layer_split=None if free_split else ask.layer_split,
            kv_dtype=dtype,
            kv_pool_mib=None if free_pool else ask.kv_pool_mib,
        )
        for last in (tried, *(less(needs, tried, costs) for less in (_less_context, _less_reserve, _less_of_both))):
            change = None if last is None else _tried(needs, ask, costs, plan, last)
            if change is not None:
                yield change


def _tried(needs: Demand, ask: Ask, costs: Costs, before: Plan, changed: Ask) -> Change | None:
    """The change from `ask` to `changed` with every figure written out, if a plan with those figures is sound."""
    after = arrange(needs, changed, costs)
    if not after.sound:
        return None
    written, flags, cost = ask, dict[str, str](), 0.0
    if changed.layer_split != ask.layer_split:
        written = replace(written, layer_split=after.split)
        flags["--layer-split"] = ",".join(map(str, after.split))
    if changed.kv_dtype != ask.kv_dtype:
        written = replace(written, kv_dtype=changed.kv_dtype)
        flags["--kv-dtype"] = changed.kv_dtype
        cost += NARROWING_COST[changed.kv_dtype]
    if changed.max_context != before.max_context:
        written = replace(written, max_context=after.max_context)
        flags["--max-context"] = str(after.max_context)
        cost += 1 - after.max_context / before.max_context
    if changed.kv_pool_mib != ask.kv_pool_mib:
        assert ask.kv_pool_mib is not None
        pool = _pool_mib(needs, changed, costs, after, ask.kv_pool_mib)
        written = replace(written, kv_pool_mib=pool)
        flags["--kv-pool-mib"] = str(pool)
        cost += max(0.0, 1 - pool / ask.kv_pool_mib)
    if changed.reserve_mib != ask.reserve_mib:
        written = replace(written, reserve_mib=changed.reserve_mib)
        flags["--vram-reserve-mib"] = ",".join(map(str, changed.reserve_mib))
    if changed.reserve_later_mib != ask.reserve_later_mib:
        written = replace(written, reserve_later_mib=changed.reserve_later_mib)
        flags["--vram-reserve-later-mib"] = str(changed.reserve_later_mib)
    cost += max(1 - new / old if old else 0.0 for old, new in zip(ask.reserves(), changed.reserves(), strict=True))
    if not flags or not arrange(needs, written, costs).sound:
        return None
    return Change(flags, cost + FURTHER_FLAG_COST * (len(flags) - 1))


def _pool_mib(needs: Demand, changed: Ask, costs: Costs, after: Plan, asked: int) -> int:
    """The pool that was asked for as far as it goes, and at least one sequence."""
    total = sum(card.owners[Owner.KV_CACHE] for card in after.cards)
    least = mib_up(sum(card.kv_minimum for card in after.cards))
    return max(least, min(asked, mib_down(total)))


def _less_context(needs: Demand, ask: Ask, costs: Costs) -> Ask | None:
    """The longest context, shorter than asked, that leaves all reserves whole with everything else as it is."""
    assert ask.max_context is not None
    shorter = (blocks_for(ask.max_context) - 1) * BLOCK_TOKENS
    context = longest_context(Arithmetic(needs, ask, costs), shorter, ask.reserves())
    return replace(ask, max_context=context) if context else None


def _less_reserve(needs: Demand, ask: Ask, costs: Costs) -> Ask | None:
    """The reserves as far as there is room for them, where the rest fits."""
    plan = arrange(needs, ask, costs)
    if not plan.fits or not plan.low:
        return None
    left = [min(card.reserve, card.room) // MIB for card in plan.cards]
    if ask.reserve_later_mib is None:
        return replace(ask, reserve_mib=tuple(left) if len(set(left)) > 1 else (left[0],))
    first = ask.stages[0]
    alike = [reserve // MIB for reserve in ask.reserves(later=False)]
    if left[first] < alike[first]:
        alike[first] = left[first]
        ask = replace(ask, reserve_mib=tuple(alike))
    return replace(ask, reserve_later_mib=min(left[position] for position in ask.later))


def _less_of_both(needs: Demand, ask: Ask, costs: Costs) -> Ask | None:
    """A context that is still of use, and the reserves as far as it leaves room for them."""
    chosen = arrange(needs, replace(ask, max_context=None), costs)
    assert ask.max_context is not None
    if chosen.max_context >= ask.max_context:
        return None
    return _less_reserve(needs, replace(ask, max_context=chosen.max_context), costs)


def _nothing_helps(needs: Demand, ask: Ask, costs: Costs) -> str:
    """How much is lacking where as little as possible was asked for."""
    least = replace(ask, max_context=1, kv_dtype="int8", layer_split=None, kv_pool_mib=None, shadow=False)
    worst = min(arrange(needs, least, costs).cards, key=lambda card: card.room - card.reserve)
    lacking = mib_up(worst.reserve - worst.room)
    return f"a smaller model or quantisation: device {worst.device} lacks {lacking} MiB even with a context of 1 token"


def _later_cost(needs: Demand, ask: Ask, costs: Costs, plan: Plan) -> LaterCost:
    """Against the plan without the flag."""
    before = arrange(needs, replace(ask, reserve_later_mib=None), costs)
    held = [[card.owners[Owner.KV_CACHE] for card in each.cards] for each in (before, plan)]
    return LaterCost(
        context_before=before.max_context,
        split_before=before.split,
        kv_lost=tuple(old - new for old, new in zip(*held, strict=True)),
        blocks_lost=before.kv_blocks - plan.kv_blocks,
    )
