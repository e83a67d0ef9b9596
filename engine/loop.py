"""The engine's only loop: take in messages, plan, launch, collect, tell.

One step behind: step n + 1 is launched before step n is collected, so that a device never waits for the host. A step
that only its own sequence's end made pointless is dropped before it begins, where the backend can.
"""

import time
from collections import deque
from typing import Protocol

from engine.errors import HandshakeError
from engine.messages import Cancel, Step, Stop, Submit, ToEngine, Token, ToService
from engine.pipeline import Pipeline
from engine.scheduler import Scheduler
from engine.sequence import StepPlan


class Inbox(Protocol):
    def poll(self, timeout: float | None) -> list[ToEngine]:
        """Messages that have arrived; waits up to `timeout` seconds (None: for ever) while there is none."""


class Outbox(Protocol):
    def send(self, message: ToService) -> None: ...


class EngineLoop:
    """Runs a scheduler's plans on a pipeline. `steps` and `turn_began` are there for a thread that watches the loop."""

    def __init__(self, pipeline: Pipeline, scheduler: Scheduler, inbox: Inbox, outbox: Outbox) -> None:
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._inbox = inbox
        self._outbox = outbox
        self._launched: deque[tuple[StepPlan, float]] = deque()
        self._collected_at = 0.0
        self._stopping = False
        self.steps = 0
        """Number of the last collected step."""
        self.turn_began: float | None = None
        """time.monotonic() at which the turn began that is now running; None while there is nothing to do."""

    def run(self) -> None:
        """Turn after turn until the service has said stop and the pipeline is drained."""
        while self.step():
            pass

    def step(self) -> bool:
        """One turn. False when it was the last one."""
        self._receive()
        self._admit()
        plan = self._scheduler.schedule()
        if plan is not None:
            self._pipeline.launch(plan)
            self._launched.append((plan, time.monotonic()))
        if len(self._launched) > 1 or (self._launched and plan is None):
            self._collect()
        else:
            self._tell([], 0, 0, 0.0)
        return not self._stopping or bool(self._launched)

    def _receive(self) -> None:
        idle = self._scheduler.idle and not self._stopping
        if idle:
            self.turn_began = None
        messages = self._inbox.poll(None if idle else 0)
        self.turn_began = time.monotonic()
        for message in messages:
            match message:
                case Submit():
                    self._scheduler.add(message)
                case Cancel():
                    self._scheduler.cancel(message.sequences)
                case Stop():
                    self._stopping = True
                case _:
                    raise HandshakeError(f"{type(message).__name__} is not for a running engine")
        if self._stopping:
            self._scheduler.cancel_all()

    def _admit(self) -> None:
        sequence = self._scheduler.admit()
        if sequence is None:
            return
        try:
            self._pipeline.admit(sequence.slot, sequence.submit, sequence.generated)
        except ValueError as error:
            self._scheduler.fail(sequence, "bad_request", str(error))

    def _collect(self) -> None:
        for slot in self._scheduler.take_dead_slots():
            self._pipeline.drop(slot)
        result = self._pipeline.collect()
        plan, launched_at = self._launched.popleft()
        now = time.monotonic()
        seconds = now - max(launched_at, self._collected_at)
        self._collected_at = now
        self.steps = result.step
        tokens = self._scheduler.apply(result)
        self._tell(tokens, len(plan.decode), len(plan.prefill.tokens) if plan.prefill else 0, seconds)

    def _tell(self, tokens: list[Token], decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        report = self._scheduler.take_report()
        for failed in report.failed:
            self._outbox.send(failed)
        if decode_rows or prefill_tokens or report.admitted or report.released:
            stats = self._scheduler.stats(decode_rows, prefill_tokens, seconds)
            self._outbox.send(Step(self.steps, tokens, report.admitted, report.released, stats))
