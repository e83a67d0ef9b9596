"""The coordinator between the sampler, the pure core and whoever carries out actions. It has no thread and no clock.

The service calls `observe` with every snapshot, and by a timer of its own at least once a second, so that a sampler
that hangs is seen too. What comes back is recorded; what is to be done has been given to `actions` by then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat, zip_longest
from typing import Protocol

from watchdog.actions import Action, Outcome, Trim
from watchdog.attribution import Ours
from watchdog.config import Mode, WatchdogConfig
from watchdog.counts import Counts
from watchdog.floors import Floors, floors_of
from watchdog.policy import rearm, reload_begun, reload_done, told
from watchdog.sampler import Sampler, pace_of
from watchdog.snapshot import DeviceSnapshot, Holdings, Reading, Snapshot, Work
from watchdog.state import Decision, EnginePhase, State
from watchdog.status import DeviceStatus, Status, accounted, drift
from watchdog.trend import slopes
from watchdog.watch import Watch, at_ready, has_room, step, view, with_policy


class Actions(Protocol):
    """Carries out what a decision asks for; it ends with `Runner.told`, `ready` or `reload_failed`."""

    def begin(self, action: Action) -> None: ...


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What the engine's plan says of a device: the reserve R and the largest allocation after ready, in bytes."""

    reserve: int
    largest_late: int = 0
    stages: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Ready:
    """An engine is ready since `at`; a device begins with a reading of a pass that began after that."""

    at: float
    plans: tuple[DevicePlan, ...]


class Runner:
    """One watchdog over one sampler. Times are those of the sampler's clock."""

    def __init__(
        self,
        sampler: Sampler,
        config: WatchdogConfig,
        actions: Actions,
        counts: Counts,
        runtime_free: Callable[[str], int | None] = lambda uuid: None,
        reloads: tuple[float, ...] = (),
    ) -> None:
        """`reloads` is the part of the budget that was spent before this service started."""
        self._sampler = sampler
        self._config = config
        self._actions = actions
        self._counts = counts
        self._runtime_free = runtime_free
        self._reloads = reloads
        self._ready: _Ready | None = None
        self._plans: tuple[DevicePlan, ...] = ()
        self._watch: Watch | None = None
        self._begun: dict[int, tuple[Reading, int]] = {}
        self._last: dict[int, Decision] = {}
        self._seen: dict[int, float] = {}
        self._work = Work(0, 0, 0, boundary=False)
        self._holdings: tuple[Holdings, ...] = ()
        self._engine: EnginePhase = "loading"

    @property
    def mode(self) -> Mode:
        return self._config.mode

    def set_mode(self, mode: Mode) -> None:
        self._config = replace(self._config, mode=mode)

    def ready(self, plans: Sequence[DevicePlan], ours: Ours) -> None:
        """An engine is ready, its worst-case pass is over: baselines, floors and trends begin anew."""
        self._begun.clear()
        self._sampler.attribute(ours)
        self._sampler.forget_lowest()
        self._sampler.request(processes=True)
        self._ready = _Ready(self._sampler.now(), tuple(plans))

    def observe(
        self, now: float, work: Work, holdings: Sequence[Holdings], engine: EnginePhase = "serving"
    ) -> list[Decision]:
        """Take in what the sampler shows. One decision for each device with a new reading, or without a fresh one."""
        self._work, self._engine = work, engine
        self._holdings = tuple(map(self._with_blocks, range(len(holdings)), repeat(holdings)))
        snapshot = self._sampler.snapshot()
        if self._ready is not None and engine == "serving":
            self._begin(self._ready, snapshot, now)
        if self._watch is None or self._ready is not None:
            return []
        return [decision for device in snapshot.devices if (decision := self._decide(device, now)) is not None]

    def told(self, outcome: Outcome, holdings: Holdings) -> None:
        """A trim, a cap or a regrowth is over; `holdings` of its device as they are now."""
        assert self._watch is not None
        self._watch = with_policy(self._watch, told(self._watch.policy, outcome, holdings))
        if isinstance(outcome.action, Trim):
            self._counts.trimmed(
                outcome.action.device, outcome.action.rung, outcome.result, outcome.returned, outcome.seconds
            )
        self._sampler.request(processes=True)

    def reload_begun(self, at: float) -> None:
        """A reload has begun that was not asked for here: an operator's, or after a crash."""
        if self._watch is not None and self._watch.policy.reloading is None:
            self._watch = with_policy(self._watch, reload_begun(self._watch.policy, at))

    def reload_failed(self, at: float) -> None:
        """No engine came of it, or the old one stays."""
        if self._watch is not None and self._watch.policy.reloading is not None:
            self._watch = with_policy(self._watch, reload_done(self._watch.policy, at, None))

    def rearm(self, device: int) -> None:
        """The operator says that a barred reload may be tried again."""
        if self._watch is not None:
            self._watch = with_policy(self._watch, rearm(self._watch.policy, device))

    @property
    def holds(self) -> bool:
        """Whether new requests must wait for memory on some device."""
        return any(decision.hold for decision in self._last.values())

    @property
    def reloads(self) -> tuple[float, ...]:
        """When automatic reloads of the last hour began: the budget, which outlives the service."""
        return self._reloads if self._watch is None else self._watch.policy.reloads

    def idle_free(self, device: int) -> int | None:
        """Idle free bytes of a device, as far as they are known by now."""
        if self._watch is None:
            return None
        return self._watch.devices[device].idle.idle_free(self._holdings[device].released)

    def status(self, now: float, wall: float) -> Status:
        """Everything that may be shown; `wall` is `now` in Unix time."""
        devices = tuple(self._status(device, now) for device in self._sampler.snapshot().devices)
        return Status(now, wall, devices)

    def _with_blocks(self, device: int, holdings: Sequence[Holdings]) -> Holdings:
        """Elastic memory comes and goes on all devices at once: it may grow on one if all that have some have room."""
        own = holdings[device]
        if not own.elastic.missing or self._watch is None or len(self._watch.devices) != len(holdings):
            return own
        others = [other for other, held in enumerate(holdings) if other != device and held.elastic.missing]
        blocked = any(not has_room(self._watch.devices[other], holdings[other]) for other in others)
        return replace(own, elastic=replace(own.elastic, blocked=blocked))

    def _begin(self, ready: _Ready, snapshot: Snapshot, now: float) -> None:
        """Begin once every device has been read since ready, or has had its time to be."""
        readings = [
            shown.reading if shown.health.failures == 0 and shown.health.attempted_at >= snapshot.at else None
            for shown in snapshot.devices
            if snapshot.at > ready.at
        ]
        if (not readings or None in readings) and now - ready.at < self._config.blind_after_s:
            return
        promised = [Reading(ready.at, max(1, plan.reserve), plan.reserve) for plan in ready.plans]
        known = tuple(reading or promise for reading, promise in zip_longest(readings, promised))
        floors = tuple(map(self._floors, known, ready.plans))
        before = self._watch
        self._watch = at_ready(known, floors, self._holdings, before)
        if before is None:
            self._watch = with_policy(self._watch, replace(self._watch.policy, reloads=self._reloads))
        self._plans, self._ready = ready.plans, None
        for device, reading in enumerate(readings):
            if reading is not None:
                self._note_begin(device, reading, floors[device])

    def _begin_late(self, device: int, reading: Reading) -> None:
        """A device that was blind at ready is seen for the first time: what is free now is its baseline."""
        assert self._watch is not None
        floors = self._floors(reading, self._plans[device])
        late = at_ready((reading,), (floors,), (self._holdings[device],)).devices[0]
        devices = (*self._watch.devices[:device], late, *self._watch.devices[device + 1 :])
        self._watch = replace(self._watch, devices=devices)
        self._note_begin(device, reading, floors)

    def _note_begin(self, device: int, reading: Reading, floors: Floors) -> None:
        self._begun[device] = (reading, sum(self._holdings[device].ledger.values()))
        self._sampler.keep_pace(device, pace_of(floors))

    def _floors(self, reading: Reading, plan: DevicePlan) -> Floors:
        return floors_of(reading.free, plan.reserve, plan.largest_late, self._config.floors)

    def _decide(self, shown: DeviceSnapshot, now: float) -> Decision | None:
        assert self._watch is not None
        device, reading = shown.device, shown.fresh(now, self._config.blind_after_s)
        if reading is not None:
            if self._seen.get(device) == reading.at:
                return None  # a sample counts once, however often it is looked at
            self._seen[device] = reading.at
            if device not in self._begun:
                self._begin_late(device, reading)
        at = now if reading is None else reading.at
        holdings = self._holdings[device]
        self._watch, decision = step(self._watch, device, at, reading, self._work, holdings, self._config, self._engine)
        self._last[device] = decision
        if decision.action is not None and not decision.dry_run:
            self._actions.begin(decision.action)
        return decision

    def _state(self, device: int, reading: Reading | None) -> State:
        if self._config.mode == "off":
            return State.DISABLED
        if self._watch is not None and self._ready is None:
            return self._watch.policy.devices[device].state
        return State.RELOAD if reading is not None else State.BLIND

    def _status(self, shown: DeviceSnapshot, now: float) -> DeviceStatus:
        device, reading = shown.device, shown.fresh(now, self._config.blind_after_s)
        status = DeviceStatus(
            device,
            shown.uuid,
            shown.name,
            shown.health,
            reading=reading,
            lowest_free=shown.lowest_free if reading else None,
            runtime_free=self._runtime_free(shown.uuid),
            state=self._state(device, reading),
        )
        if self._watch is None or device not in self._begun:
            return status
        own, holdings, (ready, held) = self._watch.devices[device], self._holdings[device], self._begun[device]
        seen = view(own, device, now, reading, self._work, holdings, self._engine)
        return replace(
            status,
            stages=self._plans[device].stages,
            idle_free=seen.idle_free if reading else None,
            floors=own.floors,
            slopes=slopes(own.trend) if reading else None,
            confidence=own.trend.confidence if reading else None,
            kind=seen.kind if reading else status.kind,
            forecast=seen.forecast if reading else None,
            ledger=accounted(holdings.ledger, reading),
            drift=drift(reading, holdings.ledger, ready, held),
            reason=self._last[device].reason if device in self._last else "",
        )
