"""The engine's only loop: take in messages, plan, launch, collect, tell.

One step behind: step n + 1 is launched before step n is collected, so that a device never waits for the host. A step
that only its own sequence's end made pointless is dropped before it begins, where the backend can. What changes memory
or hands it over runs between steps, with none launched.
"""

import time
from collections import deque
from typing import Protocol

from engine.checkpoint import Carrier
from engine.errors import HandshakeError, OutOfMemory
from engine.ladder import Ladder, NoCards
from engine.messages import (
    Cancel,
    Checkpoint,
    Checkpointed,
    Grow,
    Step,
    Stop,
    Submit,
    ToEngine,
    Token,
    ToService,
    Trim,
    Trimmed,
)
from engine.pipeline import Pipeline
from engine.scheduler import Scheduler
from engine.sequence import StepPlan


class Inbox(Protocol):
    def poll(self, timeout: float | None) -> list[ToEngine]:
        """Messages that have arrived; waits up to `timeout` seconds (None: for ever) while there is none."""


class Outbox(Protocol):
    def send(self, message: ToService) -> None: ...


class EngineLoop:
    """Runs a scheduler's plans on a pipeline. What is public is there for a thread that watches the loop."""

    def __init__(
        self,
        pipeline: Pipeline,
        scheduler: Scheduler,
        inbox: Inbox,
        outbox: Outbox,
        ladder: Ladder | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._inbox = inbox
        self._outbox = outbox
        self._ladder = ladder or Ladder(NoCards(), None, {})
        self._carrier = carrier
        self._launched: deque[tuple[StepPlan, float]] = deque()
        self._errands: deque[Trim | Grow | Checkpoint] = deque()
        self._collected_at = 0.0
        self._stopping = False
        self._resting = False
        self.steps = 0
        """Number of the last collected step."""
        self.turn_began: float | None = None
        """time.monotonic() at which the turn began that is now running; None while there is nothing to do."""
        self.kind = "decode"
        """What the turn does that is now running: "decode", "prefill", "trim" or "checkpoint"."""
        self.longest: dict[str, float] = {}
        """Seconds of the longest of each kind."""

    def run(self) -> None:
        """Turn after turn until the service has said stop and the pipeline is drained."""
        while self.step():
            pass

    def step(self) -> bool:
        """One turn. False when it was the last one."""
        self._receive()
        while self._errands and not self._resting:
            self._run_errand(self._errands.popleft())
        if self._resting:
            return not self._stopping
        self._admit()
        plan = self._scheduler.schedule()
        launched = plan is not None and self._launch(plan)
        if len(self._launched) > 1 or (self._launched and not launched):
            self._collect()
        else:
            self._tell([], 0, 0, 0.0)
        return not self._stopping or bool(self._launched)

    def _receive(self) -> None:
        idle = (self._scheduler.idle or self._resting) and not self._stopping
        wait: float | None = 0.0
        if idle:
            self.turn_began = None
            wait = self._ladder.idle_wait(time.monotonic()) if not self._resting else None
        messages = self._inbox.poll(wait)
        self.turn_began = time.monotonic()
        if idle and not messages:
            self._ladder.restore(self.turn_began)
        for message in messages:
            match message:
                case Stop():
                    self._stopping = True
                case _ if self._resting:
                    pass  # the sequences are the next engine's now
                case Submit():
                    self._scheduler.add(message)
                case Cancel():
                    self._scheduler.cancel(message.sequences)
                case Trim() | Grow() | Checkpoint():
                    self._errands.append(message)
                case _:
                    raise HandshakeError(f"{type(message).__name__} is not for a running engine")
        if self._stopping and not self._resting:
            self._scheduler.cancel_all()

    def _run_errand(self, errand: Trim | Grow | Checkpoint) -> None:
        self._drain()
        self._tell([], 0, 0, 0.0)
        began = time.monotonic()
        match errand:
            case Trim():
                self.kind = "trim"
                answer: Trimmed | Checkpointed = Trimmed(errand.request, self._ladder.trim(errand))
            case Grow():
                self.kind = "trim"
                answer = Trimmed(errand.request, self._ladder.grow(errand))
            case Checkpoint():
                self.kind = "checkpoint"
                answer = self._checkpoint(errand.budget_bytes)
        self._note(time.monotonic() - began)
        self._tell_ledger()
        self._outbox.send(answer)

    def _checkpoint(self, budget_bytes: int) -> Checkpointed:
        self._resting = True
        if self._carrier is None:
            return Checkpointed(0, 0, 0.0)
        return self._carrier.save(self._scheduler.running, budget_bytes)

    def _admit(self) -> None:
        sequence = self._scheduler.admit()
        if sequence is None:
            return
        try:
            self._pipeline.admit(sequence.slot, sequence.submit, sequence.generated)
        except ValueError as error:
            self._scheduler.fail(sequence, "bad_request", str(error))

    def _launch(self, plan: StepPlan) -> bool:
        """Launch what there is memory for: all of it, or as much as is left after trimming and preempting."""
        left: StepPlan | None = plan
        while left is not None:
            try:
                self._pipeline.launch(left)
            except OutOfMemory as error:
                self._drain()
                if not self._ladder.relieve(error.device):
                    left = self._scheduler.shed_newest(left, str(error))
            else:
                self._launched.append((left, time.monotonic()))
                return True
        return False

    def _drain(self) -> None:
        while self._launched:
            self._collect()

    def _collect(self) -> None:
        for slot in self._scheduler.take_dead_slots():
            self._pipeline.drop(slot)
        plan, launched_at = self._launched.popleft()
        self.kind = "prefill" if plan.prefill else "decode"
        result = self._pipeline.collect()
        now = time.monotonic()
        seconds = now - max(launched_at, self._collected_at)
        self._collected_at = now
        self._note(seconds)
        self.steps = result.step
        tokens = self._scheduler.apply(result)
        self._tell(tokens, len(plan.decode), len(plan.prefill.tokens) if plan.prefill else 0, seconds)

    def _note(self, seconds: float) -> None:
        self.longest[self.kind] = max(self.longest.get(self.kind, 0.0), seconds)

    def _tell(self, tokens: list[Token], decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        report = self._scheduler.take_report()
        for failed in report.failed:
            self._outbox.send(failed)
        self._tell_ledger()
        if decode_rows or prefill_tokens or report.admitted or report.released:
            stats = self._scheduler.stats(decode_rows, prefill_tokens, seconds)
            self._outbox.send(Step(self.steps, tokens, report.admitted, report.released, stats))

    def _tell_ledger(self) -> None:
        news = self._ladder.news()
        if news is not None:
            self._outbox.send(news)
