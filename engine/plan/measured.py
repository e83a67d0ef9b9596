"""What to change when a card came out fuller than planned: the plan missed something, so it must leave so much more.

The figure is the reserve plus what the plan promised and the card does not have. Cards without the first stage get it
by `--vram-reserve-later-mib`, which moves no layers while the split still fits.
"""

from collections.abc import Mapping
from dataclasses import replace

from engine.plan.arrange import Plan
from engine.plan.ask import Ask
from engine.plan.costs import COSTS, MIB, Costs
from engine.plan.demand import Demand
from engine.plan.mend import plan_cards
from engine.plan.sizes import mib_up


def mend_measured(needs: Demand, ask: Ask, plan: Plan, free: Mapping[int, int], costs: Costs = COSTS) -> dict[int, str]:
    """By device that has less than its reserve free with everything loaded: the flags that mend it.

    `free` is what each device of `plan` had once ready. Planned again with these flags, and as far from that plan as
    from this one, every card keeps the reserve that it has now; only where nothing else helps is it made smaller.
    """
    low = {place for place, card in enumerate(plan.cards) if free[card.device] < card.reserve}
    if not low:
        return {}
    wanted = [mib_up(card.reserve + max(0, card.room - free[card.device])) for card in plan.cards]
    first, flags = ask.stages[0], []
    if first in low:
        alike = [reserve // MIB for reserve in ask.reserves(later=False)]
        alike[first] = wanted[first]
        ask = replace(ask, reserve_mib=tuple(alike))
        flags.append("--vram-reserve-mib " + ",".join(map(str, alike)))
    if low - {first}:
        ask = replace(ask, reserve_later_mib=max(wanted[place] for place in ask.later))
        flags.append(f"--vram-reserve-later-mib {ask.reserve_later_mib}")
    changes = plan_cards(needs, ask, costs).changes
    if changes:  # the pool has no more to give
        others = [change for change in changes if "--vram-reserve" not in change]
        flags = [*flags, others[0]] if others else [changes[0]]
    return {plan.cards[place].device: " ".join(flags) for place in low}
