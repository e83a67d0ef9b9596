"""What an engine will allocate, computed before it allocates anything: pure arithmetic, for both processes."""

from engine.plan.arrange import CardPlan, Plan
from engine.plan.ask import DEFAULT_RESERVE_MIB, Ask, Card, parse_reserve, parse_reserves
from engine.plan.costs import COSTS, Costs
from engine.plan.demand import Demand, demand, file_demand
from engine.plan.host import CPU_SLICE_ROWS, CpuPlan, plan_cpu
from engine.plan.measured import mend_measured
from engine.plan.mend import plan_cards
from engine.plan.show import low_line, plan_data, plan_table, refusal
from engine.plan.simulate import simulate_cards
from engine.plan.sizes import parse_cards
from engine.plan.split import parse_split

__all__ = [
    "COSTS",
    "CPU_SLICE_ROWS",
    "DEFAULT_RESERVE_MIB",
    "Ask",
    "Card",
    "CardPlan",
    "Costs",
    "CpuPlan",
    "Demand",
    "Plan",
    "demand",
    "file_demand",
    "low_line",
    "mend_measured",
    "parse_cards",
    "parse_reserve",
    "parse_reserves",
    "parse_split",
    "plan_cards",
    "plan_cpu",
    "plan_data",
    "plan_table",
    "refusal",
    "simulate_cards",
]
