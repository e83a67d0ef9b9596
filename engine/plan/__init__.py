"""What an engine will allocate, computed before it allocates anything: pure arithmetic, for both processes."""

from engine.plan.host import CpuPlan, plan_cpu
from engine.plan.scratch import scratch_bytes

__all__ = ["CpuPlan", "plan_cpu", "scratch_bytes"]
