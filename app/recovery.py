"""Keeps one engine alive under the requests: first start, death, respawn, deliberate stop.

There is one path from a dead engine to a serving one, `_recover`: settle, start, resume. Requests stay in their
records meanwhile; those that arrive wait in the queue. What enters the path, and what `settle` waits for, may grow;
the path does not fork.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from app.errors import ShutDown
from app.observer import NoObserver, Observer
from app.scheduler import RequestScheduler
from engine.client import EngineClient, EngineEvents
from engine.errors import EngineDied, EngineError, LoadRefused
from engine.messages import Failed, LoadProgress, Ready, Step

log = logging.getLogger(__name__)

EngineFactory = Callable[[int, EngineEvents], EngineClient]
"""(generation, events) → an engine not started yet; `engine.client.EngineLauncher` is one."""

Phase = Literal["loading", "ready", "recovering", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits before the tries of a row of failed starts; the first try follows a death at once.

    A start has failed when no engine came of it, and also when that engine died young and without a token: a request
    that kills every engine must not keep the others down for ever.
    """

    first_s: float = 0.5
    longest_s: float = 8.0
    tries: int = 5
    young_s: float = 60.0

    def wait_s(self, failures: int) -> float:
        return 0.0 if failures == 0 else min(self.longest_s, self.first_s * 2 ** (failures - 1))


class EngineSupervisor:
    """Owns the engine of the moment. The scheduler is told when there is one (`attach`) and when not (`detach`)."""

    def __init__(
        self,
        factory: EngineFactory,
        scheduler: RequestScheduler,
        observer: Observer | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._factory = factory
        self._scheduler = scheduler
        self._observer: Observer = observer or NoObserver()
        self._backoff = backoff or Backoff()
        self._current: _Life | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._failures = 0
        self.phase: Phase = "loading"
        self.generation = 0
        self.ready: Ready | None = None
        """What the engine of the moment, or the last one, chose and has."""
        self.ready_at: float | None = None
        """When it was ready, in Unix time."""
        self.progress: LoadProgress | None = None
        """How far the load under way is."""
        self.failed = asyncio.Event()
        """Set when no engine can be had any more: every request has ended, and `failure` says why."""
        self.failure: EngineError | None = None

    @property
    def engine(self) -> EngineClient | None:
        """The engine of the moment."""
        return None if self._current is None else self._current.engine

    async def start(self) -> Ready:
        """Start the first engine. A failure is not tried again: raises LoadRefused, HandshakeError or EngineDied."""
        try:
            return await self._start_engine()
        except EngineError as error:
            self._give_up(error)
            raise

    async def stop(self, timeout_s: float) -> None:
        """End every request that is left and the engine: in order, by force after `timeout_s`."""
        self.phase = "stopped"
        current, self._current = self._current, None  # first of all: its death is no news from now on
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait([self._recovery])
        self._scheduler.drain()
        self._scheduler.fail_all(ShutDown())
        if current is not None:
            self._scheduler.detach()
            await current.engine.stop(timeout_s)

    async def _start_engine(self) -> Ready:
        """The next generation: start, load, let the requests on."""
        self.generation += 1
        self.progress = None
        life = _Life(self, self._scheduler)
        life.engine = self._factory(self.generation, life)
        self.ready = await life.engine.start()
        if life.death is not None:
            raise EngineDied(life.death)
        life.began = time.monotonic()
        self.ready_at = time.time()
        self._current = life
        self.phase = "ready"
        log.info("engine generation=%d is ready: %s", self.generation, self.ready)
        self._scheduler.attach(life.engine, self.ready.max_batch)
        return self.ready

    def died(self, life: "_Life", reason: str) -> None:
        """An engine is dead. If it was the one of the moment this enters the path, else its start fails of it."""
        life.death = reason
        if life is not self._current:
            return
        log.error("engine generation=%d is lost: %s", life.engine.generation, reason)
        if life.progressed or time.monotonic() - life.began >= self._backoff.young_s:
            self._failures = 0
        self._current = None
        self.phase = "recovering"
        self._scheduler.detach()
        self._recovery = asyncio.get_running_loop().create_task(self._recover(EngineDied(reason)))
        self._recovery.add_done_callback(self._recovered)

    async def _recover(self, error: EngineError) -> None:
        while self._failures < self._backoff.tries:
            await self._settle()
            self._failures += 1
            try:
                await self._start_engine()
            except (EngineDied, LoadRefused) as another:
                error = another
                log.error("engine generation=%d did not start: %s", self.generation, error)
            else:
                self._observer.engine_restarted("crash")
                return
        raise EngineDied(f"{error} ({self._failures} starts in a row failed)")

    async def _settle(self) -> None:
        """Wait until another start is worth its while."""
        await asyncio.sleep(self._backoff.wait_s(self._failures))

    def _recovered(self, recovery: asyncio.Task[None]) -> None:
        if self._recovery is recovery:  # else the new engine is dead already, and the next recovery under way
            self._recovery = None
        if recovery.cancelled():
            return
        error = recovery.exception()
        if isinstance(error, EngineError):
            log.critical("no engine: %s", error)
            self._give_up(error)
        elif error is not None:
            log.critical("recovery failed", exc_info=error)
            self._give_up(EngineDied(f"recovery failed: {error!r}"))

    def _give_up(self, error: EngineError) -> None:
        self.phase = "failed"
        self.failure = error
        self._scheduler.close()
        self.failed.set()


class _Life:
    """One engine's life, and the listener to its events."""

    engine: EngineClient

    def __init__(self, supervisor: EngineSupervisor, scheduler: RequestScheduler) -> None:
        self._supervisor = supervisor
        self._scheduler = scheduler
        self.began = 0.0
        self.progressed = False
        """It has yielded a token."""
        self.death: str | None = None

    def on_progress(self, progress: LoadProgress) -> None:
        self._supervisor.progress = progress

    def on_step(self, step: Step) -> None:
        self.progressed = self.progressed or bool(step.tokens)
        self._scheduler.on_step(step)

    def on_failed(self, failed: Failed) -> None:
        self._scheduler.on_failed(failed)

    def on_dead(self, reason: str) -> None:
        self._supervisor.died(self, reason)
