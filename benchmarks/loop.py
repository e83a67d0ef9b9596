"""What a step costs before anything is computed: the engine's loop around a pipeline that does nothing.

Inbox, scheduler, plan, results, the Step message and its encoding as a frame are included; no model, no socket.
"""

import sys
import time
from collections import deque
from typing import Any

from engine.framing import encode
from engine.kv_cache.blocks import BlockPool
from engine.loop import EngineLoop
from engine.messages import Sampling, Submit, ToEngine, ToService
from engine.pipeline import Pipeline
from engine.scheduler import Scheduler
from engine.sequence import Sampled, StepPlan, StepResult

LIMITS_MS = {1: 0.3, 8: None, 64: 0.8}
"""Must-reach per step, by batch."""

PROMPT_TOKENS = 500
STEPS = 2_000
WARM_UP_STEPS = 100


class NullPipeline(Pipeline):
    """Token 7 for every row, at once."""

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()

    def admit(self, slot: int, submit: Submit, generated: list[int]) -> None:
        pass

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        sampled = [Sampled(row.slot, 7) for row in plan.decode]
        if plan.prefill is not None and plan.prefill.completes:
            sampled.append(Sampled(plan.prefill.slot, 7))
        return StepResult(plan.step, sampled)

    def drop(self, slot: int) -> None:
        pass

    @property
    def in_flight(self) -> int:
        return len(self._plans)


class Wire:
    """Inbox and outbox: frames are encoded, counted and thrown away."""

    def __init__(self, messages: list[ToEngine]) -> None:
        self._messages = messages
        self.sent_bytes = 0

    def poll(self, timeout: float | None) -> list[ToEngine]:
        messages, self._messages = self._messages, []
        return messages

    def send(self, message: ToService) -> None:
        self.sent_bytes += len(encode(1, message))


def measure(batch: int) -> dict[str, Any]:
    """Milliseconds a step: median, and the mean, which also holds the steps in which new blocks begin."""
    submits: list[ToEngine] = [
        Submit(sequence, [sequence] * PROMPT_TOKENS, [], Sampling(seed=sequence), 1 << 20, (2,))
        for sequence in range(batch)
    ]
    length = PROMPT_TOKENS + WARM_UP_STEPS + STEPS + 2 * batch
    pool = BlockPool(batch * (-(-length // 64) + 1))
    wire = Wire(submits)
    loop = EngineLoop(NullPipeline(), Scheduler(pool, batch, length), wire, wire)
    for _ in range(batch + WARM_UP_STEPS):
        loop.step()
    sent_before = wire.sent_bytes
    taken = []
    for _ in range(STEPS):
        began = time.perf_counter()
        loop.step()
        taken.append((time.perf_counter() - began) * 1e3)
    return {
        "batch": batch,
        "median_ms": round(sorted(taken)[STEPS // 2], 4),
        "mean_ms": round(sum(taken) / STEPS, 4),
        "limit_ms": LIMITS_MS[batch],
        "frame_bytes": (wire.sent_bytes - sent_before) // STEPS,
    }


def run() -> dict[str, Any]:
    rows = [measure(batch) for batch in LIMITS_MS]
    lines = ["batch   median ms   mean ms   limit ms   frame bytes"]
    for row in rows:
        limit = "–" if row["limit_ms"] is None else f"{row['limit_ms']:.1f}"
        lines.append(
            f"{row['batch']:5}   {row['median_ms']:9.3f}   {row['mean_ms']:7.3f}   {limit:>8}   {row['frame_bytes']:11}"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    return {"rows": rows}
