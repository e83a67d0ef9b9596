"""One engine's life as the supervisor keeps it, and the listener to its events."""

import asyncio
import time
from typing import Protocol

from app.scheduler import RequestScheduler
from engine.client import EngineClient
from engine.messages import Failed, Ledger, LoadProgress, Step


class Supervisor(Protocol):
    """Whom a life tells what is not for the requests."""

    def progressed(self, life: "Life", progress: LoadProgress) -> None: ...

    def stepped(self, life: "Life", step: Step) -> None: ...

    def holds(self, life: "Life", ledger: Ledger) -> None: ...

    def died(self, life: "Life", reason: str) -> None: ...


class Life:
    engine: EngineClient

    def __init__(self, supervisor: Supervisor, scheduler: RequestScheduler) -> None:
        self._supervisor = supervisor
        self._scheduler = scheduler
        self.began = 0.0
        """When it was ready."""
        self.has_served = False
        """It has yielded a token."""
        self.is_current = False
        """It serves. What else arrives is of the past: its requests go on elsewhere."""
        self.silent_s = 0.0
        """While it starts: for how long nothing has been heard of it."""
        self.death: str | None = None

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began

    async def end(self, asked_s: float, reap_s: float) -> bool:
        """End the engine in order within `asked_s`, else by force; whether nothing is left of it `reap_s` later."""
        if not asked_s:
            self.engine.kill()
        ending = asyncio.ensure_future(self.engine.stop(asked_s) if asked_s else self.engine.wait())
        try:
            done, _ = await asyncio.wait([ending], timeout=asked_s + reap_s)
        finally:
            ending.cancel()
        return bool(done)

    def on_progress(self, progress: LoadProgress) -> None:
        self.silent_s = 0.0
        self._supervisor.progressed(self, progress)

    def on_step(self, step: Step) -> None:
        if self.is_current:
            self._scheduler.on_step(step)
            self._supervisor.stepped(self, step)

    def on_failed(self, failed: Failed) -> None:
        if self.is_current:
            self._scheduler.on_failed(failed)

    def on_ledger(self, ledger: Ledger) -> None:
        self._supervisor.holds(self, ledger)

    def on_dead(self, reason: str) -> None:
        self._supervisor.died(self, reason)
