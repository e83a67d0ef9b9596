"""One replacement of the engine, planned or forced: why, how far it is, how long each phase took."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from app.observer import Observer

log = logging.getLogger(__name__)

Reason = Literal["vram_floor", "vram_growth", "vram_forecast", "engine_fault", "operator"]
Phase = Literal["prepare", "drain", "checkpoint", "teardown", "load", "warmup", "replay"]
Result = Literal["ok", "failed", "aborted"]
Restart = Literal["reload", "operator", "crash", "hang"]

AUTOMATIC: tuple[Reason, ...] = ("vram_floor", "vram_growth", "vram_forecast")
"""What the watchdog asks for; these have a budget."""
OUTAGE: tuple[Phase, ...] = ("drain", "checkpoint", "teardown", "load", "warmup")
"""The phases in which no engine serves, in their order; `replay` is over when everything interrupted has gone on."""


class ReloadInProgress(Exception):
    """Another one is under way; `progress` says how far it is."""

    def __init__(self, progress: dict[str, Any]) -> None:
        super().__init__(f"a reload is in progress: {progress['phase']}")
        self.progress = progress


@dataclass(frozen=True, slots=True)
class Report:
    """How one ended. `seconds` is from the first moment without an engine until everything had gone on."""

    reason: Reason
    result: Result
    seconds: float
    phases: Mapping[str, float]

    def json(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "result": self.result,
            "seconds": round(self.seconds, 6),
            "phases": {phase: round(seconds, 6) for phase, seconds in self.phases.items()},
        }


class Reload:
    """From the decision to the report. Every phase ends where the next begins; one may come again."""

    def __init__(self, number: int, reason: Reason, restart: Restart, generation: int, observer: Observer) -> None:
        self.id = f"reload-{number}"
        self.reason: Reason = reason
        self.restart: Restart = restart
        self.generation = generation
        """Of the engine that is to come; a start that fails raises it."""
        self.started_at = datetime.now(UTC)
        self.phase: Phase = "prepare"
        self._observer = observer
        self._phases: dict[Phase, float] = {}
        self._entered = time.monotonic()
        self._outage_from: float | None = None
        observer.reload_begun(reason)

    def enter(self, phase: Phase) -> None:
        """The phase so far is over."""
        now = time.monotonic()
        if self.phase != "prepare":
            self._add(self.phase, now - self._entered)
        if self._outage_from is None:
            self._outage_from = now
        self.phase = phase
        self._entered = now

    def drained(self, copying_s: float) -> None:
        """The checkpoint is there: the time since the drain began is split, of which so much was copying."""
        now = time.monotonic()
        copying_s = min(copying_s, now - self._entered)
        self._add("drain", now - self._entered - copying_s)
        self._add("checkpoint", copying_s)
        self.phase = "checkpoint"
        self._entered = now

    def end(self, result: Result) -> Report:
        now = time.monotonic()
        if self.phase != "prepare":
            self._add(self.phase, now - self._entered)
        total = now - (self._outage_from if self._outage_from is not None else now)
        for phase, seconds in self._phases.items():
            self._observer.reload_phase(phase, seconds)
        if self._outage_from is not None:
            self._observer.reload_phase("total", total)
        self._observer.reload_ended(self.reason, result)
        return Report(self.reason, result, total, {str(phase): seconds for phase, seconds in self._phases.items()})

    def progress(self) -> dict[str, Any]:
        return {"id": self.id, "generation": self.generation, "phase": self.phase}

    def _add(self, phase: Phase, seconds: float) -> None:
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds


class Reloads:
    """The one under way, if one is, and what is known from the one before."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._count = 0
        self._usual: Mapping[str, float] = {}
        self.now: Reload | None = None
        self.last: Report | None = None

    def expect(self, phases: Mapping[str, float]) -> None:
        """An outage takes about as long, in seconds by phase."""
        self._usual = phases

    def begin(self, reason: Reason, restart: Restart, generation: int) -> Reload:
        assert self.now is None
        self._count += 1
        self.now = Reload(self._count, reason, restart, generation, self._observer)
        log.warning("%s begins: %s", self.now.id, reason)
        return self.now

    def outage_left_s(self, phase: Phase) -> float | None:
        """How long no engine will serve, from the beginning of `phase` on; None when nothing is known."""
        return sum(self._usual.get(later, 0.0) for later in OUTAGE[OUTAGE.index(phase) :]) or None

    def end(self, result: Result) -> None:
        """The one under way is over."""
        reload, self.now = self.now, None
        assert reload is not None
        self.last = report = reload.end(result)
        if result == "ok":
            self.expect(report.phases)
        phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in report.phases.items())
        log.warning("%s is over, %s: %.3f s (%s)", reload.id, result, report.seconds, phases)

    def json(self, generation: int, budget_left: int) -> dict[str, Any]:
        """The `reload` object of the admin API; `generation` is that of the engine when nothing is under way."""
        now = self.now
        return {
            "in_progress": now is not None,
            "phase": now and now.phase,
            "generation": now.generation if now else generation,
            "reason": now and now.reason,
            "started_at": now and now.started_at.isoformat().replace("+00:00", "Z"),
            "last": self.last and self.last.json(),
            "budget_left": budget_left,
        }
