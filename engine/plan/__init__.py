"""What an engine will allocate, computed before it allocates anything: pure arithmetic, for both processes."""

from engine.plan.arrange import CardPlan, Plan
from engine.plan.ask import Ask, Card, parse_reserves
from engine.plan.costs import COSTS, Costs
from engine.plan.demand import Demand, demand
from engine.plan.host import CpuPlan, plan_cpu
from engine.plan.mend import plan_cards
from engine.plan.scratch import scratch_bytes
from engine.plan.sizes import parse_cards
from engine.plan.split import parse_split

__all__ = [
    "COSTS",
    "Ask",
    "Card",
    "CardPlan",
    "Costs",
    "CpuPlan",
    "Demand",
    "Plan",
    "demand",
    "parse_cards",
    "parse_reserves",
    "parse_split",
    "plan_cards",
    "plan_cpu",
    "scratch_bytes",
]
