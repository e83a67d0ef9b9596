"""Carries out what the watchdog decides: trims, growth and reloads as messages and calls, holds at the scheduler.

The watchdog itself (watchdog/) is pure. Here is its place in the service: it is given every snapshot of the devices
together with what the engine holds and does at that moment, and its decisions become acts, one after another. What an
act gave back is measured by readings of the devices before and after it. All of it runs on the event loop.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import datetime

from app.devices import Devices
from app.errors import ApiError, DevicePressure
from app.events import Events, rfc3339
from app.observer import NoObserver
from app.pressure_acts import Acts
from app.pressure_books import Books
from app.pressure_notes import Done, Notes
from app.pressure_samples import Samples
from app.pressure_work import Mark, Marks, Workload
from app.recovery import EngineSupervisor, ReloadInProgress
from app.request_table import RequestTable
from app.scheduler import RequestScheduler
from engine.client import EngineClient
from watchdog.actions import Action, Cap, Regrow, Reload, Rung, Trim
from watchdog.attribution import UNKNOWN, engine_process
from watchdog.config import Mode, WatchdogConfig
from watchdog.counts import Counts
from watchdog.runner import Runner
from watchdog.sampler import Sampler
from watchdog.snapshot import Holdings, Snapshot
from watchdog.source import Card
from watchdog.state import Decision, EnginePhase, mib
from watchdog.status import Status

log = logging.getLogger(__name__)

TICK_S = 0.5
"""How often it looks when no snapshot comes: also a sampler that hangs must be seen."""

PHASES: dict[str, EnginePhase] = {"loading": "loading", "ready": "serving", "recovering": "reloading", "stuck": "stuck"}


class Pressure(NoObserver):
    """One watchdog over one engine after another. It is the observer of reloads; of requests the Workload is."""

    def __init__(
        self,
        devices: Devices,
        config: WatchdogConfig,
        events: Events,
        table: RequestTable,
        reloads: Sequence[float] = (),
    ) -> None:
        """`reloads`: Unix times of the automatic ones of the last hour, under an earlier service."""
        self._machine = devices
        self._sampler = sampler = Sampler(devices.source)
        self._configured = config.mode
        self._events = events
        self._notes = Notes(events)
        self._supervisor: EngineSupervisor | None = None
        self._scheduler: RequestScheduler | None = None
        self.samples = Samples(sampler)
        self._books = Books(self.samples.uuids)
        self.counts = Counts(len(self.samples.uuids))
        self._acts = Acts(self.samples, self._books, self.counts, self._notes, self._engine, self._holdings)
        offset = sampler.now() - time.time()
        spent = tuple(at + offset for at in reloads)
        self._runner = Runner(sampler, config, self, self.counts, reloads=spent)
        self.workload = Workload(table, sampler.now, self._idle_floors, lambda lists: sampler.request(processes=lists))
        self._met = 0
        """Generation of the engine that the runner was last told of."""
        self._awaited = False
        """Its first readings have not come yet."""
        self._holding = False
        self._until: tuple[datetime, asyncio.TimerHandle] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # Life.

    @property
    def devices(self) -> int:
        return len(self.samples.uuids)

    @property
    def cards(self) -> Sequence[Card]:
        return self._machine.source.cards

    def start(self, supervisor: EngineSupervisor, scheduler: RequestScheduler) -> None:
        """Watch from now on. Without devices there is nothing to watch."""
        self._supervisor, self._scheduler = supervisor, scheduler
        self.samples.start(self._look)
        if self.devices:
            self._tick()

    async def stop(self) -> None:
        for timer in (self._timer, self._until and self._until[1]):
            if timer is not None:
                timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self.devices:
            await self.samples.stop()

    # What others see of it.

    def status(self) -> Status:
        return self._runner.status(self._sampler.now(), time.time())

    @property
    def mode(self) -> Mode | str:
        """`disabled` where there is nothing to watch."""
        return self._runner.mode if self.devices else "disabled"

    @property
    def until(self) -> datetime | None:
        """When the mode becomes what the settings say again."""
        return None if self._until is None else self._until[0]

    # What an operator may ask for.

    def set_mode(self, mode: Mode, until: datetime | None) -> None:
        """`until` None: until somebody sets another one, or the service starts again.

        Whatever it was before, a reload that was barred may be tried again.
        """
        if self._until is not None:
            self._until[1].cancel()
            self._until = None
        self._runner.set_mode(mode)
        for device in range(self.devices):
            self._runner.rearm(device)
        if until is not None:
            delay = max(0.0, until.timestamp() - time.time())
            self._until = until, asyncio.get_running_loop().call_later(delay, self._restore_mode)
        end = f" until {rfc3339(until.timestamp())}" if until else ""
        self._events.record("mode", f"set to {mode} by an operator{end}")

    async def trim(self, rungs: Sequence[Rung], device: int | None) -> list[Done]:
        """Take rungs, one after another, on one device or on all. Raises EngineDied, also if there is no engine."""
        done = await self._acts.trim(rungs, device)
        self._sampler.request(processes=True)
        return done

    # The runner's actions: what the policy asks for.

    def begin(self, action: Action) -> None:
        if isinstance(action, Reload):
            asyncio.get_running_loop().call_soon(self._reload, action)  # once the decision has been noted
            return
        task = asyncio.create_task(self._carry_out(action), name=f"watchdog: {action}")
        self._tasks.add(task)
        task.add_done_callback(self._carried_out)

    def _reload(self, action: Reload) -> None:
        assert self._supervisor is not None
        try:
            self._supervisor.reload(action.reason.value)
        except ReloadInProgress:
            return  # somebody else's has just begun, and it does what is wanted
        except ApiError as error:
            log.warning("device %d: the watchdog's reload is refused: %s", action.device, error)
            self._runner.reload_failed(self._sampler.now())

    async def _carry_out(self, action: Trim | Regrow | Cap) -> None:
        outcome = await self._acts.carry_out(action)
        self._runner.told(outcome, self._holdings()[action.device])

    def _carried_out(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("%s failed", task.get_name(), exc_info=task.exception())

    # The observer of reloads.

    def reload_begun(self, reason: str) -> None:
        self._runner.reload_begun(self._sampler.now())
        self._events.record("reload", f"begins: {reason}", rung="reload")

    def reload_returned(self, device: int, bytes: int) -> None:
        reason = f"the new engine has {mib(bytes)} more free than the old one had"
        self._events.record("reload", reason, device=device, rung="reload", returned_bytes=bytes)

    def reload_ended(self, reason: str, result: str) -> None:
        if result != "ok":
            self._runner.reload_failed(self._sampler.now())
        self._events.record("reload", f"is over: {result} ({reason})", rung="reload")

    # Looking.

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._look()

    def _look(self) -> None:
        """Take in what the sampler shows now, and what the engine does and holds."""
        supervisor, scheduler = self._supervisor, self._scheduler
        assert supervisor is not None
        assert scheduler is not None
        engine, snapshot = supervisor.engine, self._sampler.snapshot()
        if engine is not None and engine.generation != self._met:
            self._meet(engine, supervisor)
        settled = engine is not None and not supervisor.reloading and not self._acts.in_flight
        work = self.workload.work(
            snapshot.at,
            quiet=settled and snapshot.at > self._acts.over_at,
            busy=scheduler.busy or scheduler.held > 0,
        )
        holdings = self._holdings()
        decisions = self._runner.observe(self._sampler.now(), work, holdings, PHASES.get(supervisor.phase, "loading"))
        self.workload.marked(self._marks(snapshot, holdings, -1 if engine is None else engine.generation))
        self._note(decisions)
        self._hold_or_not(scheduler)

    def _meet(self, engine: EngineClient, supervisor: EngineSupervisor) -> None:
        """Another engine serves."""
        assert supervisor.ready is not None
        self._met = engine.generation
        self._awaited = True
        self._books.begin(engine.generation, supervisor.ready)
        self.workload.begin()
        ours = UNKNOWN if engine.pid is None else engine_process(engine.pid, self._machine.own_source)
        self._runner.ready(self._books.plans(), ours)

    def _note(self, decisions: Sequence[Decision]) -> None:
        if decisions and self._awaited:
            self._awaited = False
            self._notes.ready(self._met, self.status().devices)
            self._machine.when_watching(self._sampler.now())
        for decision in decisions:
            self._notes.decided(decision, acting=self._acts.in_flight)

    def _hold_or_not(self, scheduler: RequestScheduler) -> None:
        """New requests wait while a device has no memory for them."""
        holding = self._runner.holds
        if holding == self._holding:
            return
        self._holding = holding
        if holding:
            scheduler.hold_arrivals(DevicePressure)
            self._events.record("hold", "new requests wait: a device has next to no free memory")
        else:
            scheduler.admit_arrivals()
            self._events.record("hold", "new requests are admitted again")

    def _holdings(self) -> list[Holdings]:
        supervisor = self._supervisor
        if supervisor is None or supervisor.engine is None:
            return self._books.nothing()
        told = None if supervisor.ledger is None else supervisor.ledger.devices
        return self._books.holdings(told, self.workload.blocks_used)

    @staticmethod
    def _marks(snapshot: Snapshot, holdings: Sequence[Holdings], generation: int) -> Marks:
        readings = [device.reading if device.health.failures == 0 else None for device in snapshot.devices]
        marks = [
            Mark(None, None, {}) if reading is None else Mark(reading.free, reading.own, held.ledger)
            for reading, held in zip(readings, holdings, strict=True)
        ]
        return Marks(snapshot.at, generation, marks)

    def _idle_floors(self) -> list[int | None]:
        return [self._runner.idle_free(device) for device in range(self.devices)]

    def _engine(self) -> EngineClient | None:
        return None if self._supervisor is None else self._supervisor.engine

    def _restore_mode(self) -> None:
        self._until = None
        self._runner.set_mode(self._configured)
        self._events.record("mode", f"set back to {self._configured}: the time it was changed for is over")
