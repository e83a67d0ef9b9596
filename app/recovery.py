"""Keeps one engine under the requests: first start, planned reload, death, hang, deliberate stop.

There is one path from an engine to the next, `_replace`: the old one ends, its memory comes back, the new one loads,
the requests go on from their records. A planned reload enters it at the beginning, with a successor that is prepared
and with KV to carry over; a crash, a hang and a kill -9 enter it with the old engine gone. Requests stay in their
records meanwhile, and those that arrive are held.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Literal

from app.boot import Boot
from app.card_lock import CardLocks, shared_folder
from app.carry import Carry, NoCarry
from app.errors import EngineLoading, EngineUnavailable, ShutDown
from app.hang import HangWatch
from app.life import Life
from app.observer import NoObserver, Observer
from app.patience import Backoff, Patience
from app.reload import AUTOMATIC, OUTAGE, Phase, Reason, Reload, ReloadInProgress, Reloads, Restart
from app.scheduler import RequestScheduler
from app.settle import CardReading, Cards, NoCards, settle
from app.starter import EngineFactory, Starter
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import EngineDied, EngineError
from engine.messages import Checkpointed, Ledger, LoadProgress, Ready, Step

log = logging.getLogger(__name__)

__all__ = ["Backoff", "EngineFactory", "EngineSupervisor", "Patience", "ReloadInProgress"]

State = Literal["loading", "ready", "recovering", "stuck", "failed", "stopped"]

WARMUP = ("kernels", "graphs", "warmup")
"""Phases of a load that come once the weights are there."""


class EngineSupervisor:
    """Owns the engine of the moment. The scheduler is told when there is one (`attach`) and when not (`detach`)."""

    def __init__(
        self,
        factory: EngineFactory,
        config: EngineConfig,
        scheduler: RequestScheduler,
        observer: Observer | None = None,
        *,
        patience: Patience | None = None,
        cards: Cards | None = None,
        carry: Carry | None = None,
        boot: Boot | None = None,
        locks: CardLocks | None = None,
    ) -> None:
        """`config` is what was asked for, with no part left out."""
        self._scheduler = scheduler
        self._observer: Observer = observer or NoObserver()
        self._patience = patience or Patience()
        self._cards: Cards = cards or NoCards()
        self._carry: Carry = carry or NoCarry()
        self._boot = boot or Boot()
        locks = locks or CardLocks(shared_folder())
        self._starter = Starter(factory, config, scheduler, self._patience, self._cards, self._boot, locks)
        largest_chunk = max(config.prefill_chunk, config.prefill_chunk_idle)
        self._hang = HangWatch(self._patience.hang_s, self._patience.tick_s, largest_chunk)
        self._current: Life | None = None
        self._leaving: Life | None = None
        self._reloads = Reloads(self._observer)
        self._tasks: set[asyncio.Task[None]] = set()
        self._readings: deque[Sequence[CardReading]] = deque(maxlen=2)
        """Of the last two ticks: the older is of a time at which an engine that has just died still lived."""
        self.phase: State = "loading"
        self.ready_at: float | None = None
        """When the last engine was ready, in Unix time."""
        self.progress: LoadProgress | None = None
        """How far the load under way is."""
        self.ledger: Ledger | None = None
        """What the engine of the moment says that it holds."""
        self.failed = asyncio.Event()
        """Set when no engine can be had any more: every request has ended, and `failure` says why."""
        self.failure: EngineError | None = None

    @property
    def engine(self) -> EngineClient | None:
        """The engine of the moment."""
        return None if self._current is None else self._current.engine

    @property
    def generation(self) -> int:
        """Of the youngest engine, which may not serve yet."""
        return self._starter.generation

    @property
    def ready(self) -> Ready | None:
        """What the engine of the moment, or the last one, chose and has."""
        return self._starter.ready

    @property
    def reloading(self) -> bool:
        """From the decision, or a death, until everything interrupted has gone on."""
        return self._reloads.now is not None

    # From outside: start, reload, stop.

    async def start(self) -> Ready:
        """Start the first engine. A failure is not tried again: raises LoadRefused, HandshakeError or EngineDied."""
        self._run(self._look_now_and_then())
        began = time.monotonic()
        life = self._make()
        try:
            ready, config = await self._starter.first(life)
        except EngineError as error:
            self._give_up(error)
            raise
        self._reloads.expect({"load": time.monotonic() - began})
        self._serve(life, ready, config)
        self._run(self._measure(()))
        return ready

    def reload(self, reason: Reason) -> dict[str, Any]:
        """Replace the engine without losing a request; returns at once with `{"id", "generation", "phase"}`.

        Raises ReloadInProgress when one is under way, and an ApiError when there is no engine to replace.
        """
        if self._reloads.now is not None:
            raise ReloadInProgress(self._reloads.now.progress())
        old = self._current
        if old is None:
            raise EngineLoading() if self.phase == "loading" else EngineUnavailable()
        if reason in AUTOMATIC:
            self._boot.reloaded()
        restart: Restart = "operator" if reason == "operator" else "reload"
        reload = self._reloads.begin(reason, restart, self.generation + 1)
        self._run(self._replace(reload, old, planned=True))
        return reload.progress()

    def status(self) -> dict[str, Any]:
        """The `reload` object of the admin API."""
        current = self._current
        generation = self.generation if current is None else current.engine.generation
        return self._reloads.json(generation, self._boot.budget_left())

    async def stop(self, timeout_s: float) -> None:
        """End every request that is left and the engine: in order, by force after `timeout_s`."""
        self.phase = "stopped"
        current, self._current = self._current, None  # first of all: its death is no news from now on
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._patience.reap_s)
        if self._reloads.now is not None:
            self._reloads.end("aborted")
        self._scheduler.drain()
        self._scheduler.fail_all(ShutDown())
        if current is not None:
            self._scheduler.detach(crashed=False)
        for life, asked_s in ((current, timeout_s), (self._leaving, 0.0)):
            if life is not None and not await life.end(asked_s, self._patience.reap_s):
                log.error("engine generation=%d is left behind: it cannot be killed", life.engine.generation)

    # What the lives tell.

    def progressed(self, life: Life, progress: LoadProgress) -> None:
        self.progress = progress
        reload = self._reloads.now
        if reload is not None and reload.phase == "load" and progress.phase in WARMUP:
            self._enter(reload, "warmup")

    def stepped(self, life: Life, step: Step) -> None:
        self._hang.step(step.stats)
        if step.tokens and not life.has_served:
            life.has_served = True
            self._prove()

    def holds(self, life: Life, ledger: Ledger) -> None:
        if life.is_current:
            self.ledger = ledger

    def died(self, life: Life, reason: str) -> None:
        """An engine is dead. If it was the one of the moment this enters the path, else its start fails of it."""
        life.death = reason
        self._lose(life, "crash", reason)

    # The path.

    def _lose(self, life: Life, restart: Restart, reason: str) -> None:
        """This engine serves no more, against our will."""
        if life is not self._current:
            return
        log.error("engine generation=%d is lost: %s", life.engine.generation, reason)
        if not life.has_served and life.age_s < self._patience.backoff.young_s:
            self._starter.lives_in_vain += 1
        self._part(life, crashed=True)
        reload = self._reloads.now
        if reload is not None and reload.phase != "replay":
            self._enter(reload, "teardown")  # it was to go anyway: `_replace` finds it gone
            return
        if reload is not None:
            self._reloads.end("ok")
        reload = self._reloads.begin("engine_fault", restart, self.generation + 1)
        self._enter(reload, "teardown")
        self._run(self._replace(reload, life, planned=False))

    def _part(self, life: Life, *, crashed: bool) -> None:
        """From now on nothing is taken from this engine."""
        life.is_current = False
        self._current = None
        self._leaving = life
        self.phase = "recovering"
        self.ledger = None
        self._scheduler.detach(crashed=crashed)

    async def _replace(self, reload: Reload, old: Life, *, planned: bool) -> None:
        before = self._readings[0] if self._readings else ()
        successor = self._make()
        preparing = asyncio.create_task(self._prepared(successor))
        checkpointed = None
        try:
            if planned:
                problem = await asyncio.shield(preparing)
                if problem is not None and old.is_current:
                    log.error("%s is given up and the engine stays: %s", reload.id, problem)
                    self._reloads.end("aborted")
                    return
                if old.is_current:
                    checkpointed = await self._drain(reload, old)
                    before = await self._cards.sample() if checkpointed else before
            if reload.phase != "teardown":
                self._enter(reload, "teardown")
            await self._bury(old, asked=checkpointed is not None)
            await settle(self._cards, self._ours(before), timeout_s=self._patience.settle_s)
            self._load_begins(reload, successor)
            await asyncio.shield(preparing)
            life, ready, config = await self._starter.next(
                successor,
                self._make,
                lambda life: self._load_begins(reload, life),
                restore=checkpointed is not None and checkpointed.blocks > 0,
                all_parts=reload.reason == "operator",
                cause=old.death or "it was to be replaced",
            )
        except BaseException:
            preparing.cancel()
            await successor.engine.abandon()
            raise
        self._serve(life, ready, config)
        await self._measure(before)

    async def _prepared(self, life: Life) -> EngineError | None:
        """What went wrong with the first half of a start; the second half meets it again."""
        try:
            await self._starter.prepare(life)
        except EngineError as error:
            return error
        return None

    async def _drain(self, reload: Reload, old: Life) -> Checkpointed | None:
        """Take the requests from the engine at a step boundary, with their KV; None if it is lost before that."""
        budget_bytes = self._carry.budget_bytes()
        self._carry.clear()
        self._scheduler.pause()
        self._enter(reload, "drain")
        try:
            checkpointed = await old.engine.checkpoint(budget_bytes)
        except EngineDied as error:
            self._lose(old, "crash", str(error))
            return None
        if not old.is_current:
            return None
        reload.drained(checkpointed.seconds)
        self._part(old, crashed=False)
        return checkpointed

    async def _bury(self, old: Life, *, asked: bool) -> None:
        """Until nothing is left of an engine, however long that takes."""
        if not await old.end(self._patience.stop_s if asked else 0.0, self._patience.reap_s):
            self.phase = "stuck"
            log.critical(
                "engine generation=%d cannot be killed, so none can take its place: look for an Xid in the kernel's "
                "log; the machine may have to be rebooted",
                old.engine.generation,
            )
            await old.engine.wait()
            self.phase = "recovering"
        self._leaving = None

    def _serve(self, life: Life, ready: Ready, config: EngineConfig) -> None:
        """Let the requests on to an engine that is ready."""
        life.began = time.monotonic()
        life.is_current = True
        self._current = life
        self.ready_at = time.time()
        self.phase = "ready"
        self._hang.begin()
        self._readings.clear()
        self._carry.clear()
        self._boot.left_out(config.without)
        log.info("engine generation=%d is ready: %s", life.engine.generation, ready)
        reload = self._reloads.now
        if reload is None:
            self._scheduler.attach(life.engine, ready.max_batch)
            return
        self._observer.engine_restarted(reload.restart)
        self._enter(reload, "replay")
        self._scheduler.attach(life.engine, ready.max_batch, lambda: self._replayed(reload))

    def _replayed(self, reload: Reload) -> None:
        """Everything that had been interrupted has gone on, or has ended: perhaps with the service itself."""
        if reload is self._reloads.now:
            self._reloads.end("ok")

    async def _measure(self, before: Sequence[CardReading]) -> None:
        """What there is now, and how much of it a reload gave back."""
        now = await self._cards.sample()
        self._readings.append(now)
        free = {reading.device: reading.free for reading in now}
        for was in self._ours(before):
            if was.device in free:
                self._observer.reload_returned(was.device, max(0, free[was.device] - was.free))

    # Inside.

    def _make(self) -> Life:
        return self._starter.beget(Life(self, self._scheduler))

    def _ours(self, readings: Sequence[CardReading]) -> list[CardReading]:
        """Those of devices that the engine uses."""
        ours = {device.uuid for device in self.ready.devices} if self.ready is not None else set()
        return [reading for reading in readings if reading.uuid in ours]

    def _enter(self, reload: Reload, phase: Phase) -> None:
        reload.enter(phase)
        if phase in OUTAGE:
            self._scheduler.expect_engine(self._reloads.outage_left_s(phase))

    def _load_begins(self, reload: Reload, life: Life) -> None:
        reload.generation = life.engine.generation
        self._enter(reload, "load")

    def _prove(self) -> None:
        """The engine of the moment is good for something."""
        self._starter.lives_in_vain = 0
        self._boot.proved()

    async def _look_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._patience.tick_s)
            self._look()

    def _look(self) -> None:
        self._readings.append(self._cards.latest())
        self._starter.look(self._patience.tick_s)
        life = self._current
        if life is None:
            return
        if life.age_s >= self._patience.backoff.young_s:
            self._prove()
        reload = self._reloads.now
        draining = reload is not None and reload.phase == "drain"
        silent_s = self._hang.look(
            time.monotonic(),
            busy=self._scheduler.busy or draining,
            prefill_tokens=self._scheduler.longest_prefill,
        )
        if silent_s is not None:
            self._lose(life, "hang", f"it has work and has done no step for {silent_s:.0f} s")
            life.engine.kill()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ran)

    def _ran(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, EngineError):
            log.critical("recovery failed", exc_info=error)
            error = EngineDied(f"recovery failed: {error!r}")
        if self._current is None:
            log.critical("no engine: %s", error)
            self._give_up(error)
        elif self._reloads.now is not None and self._reloads.now.phase == "prepare":
            self._reloads.end("aborted")

    def _give_up(self, error: EngineError) -> None:
        self.phase = "failed"
        self.failure = error
        self._scheduler.close()
        if self._reloads.now is not None:
            self._reloads.end("failed")
        self.failed.set()
