"""Source to decision for one device and one sample, all of it pure: idle floor, trend, view, policy.

The runner keeps one `Watch`, feeds it, carries out what a decision asks for and tells the outcome (policy.told).
`Watch.at_ready` is called when an engine becomes ready, with a reading of each device after the worst-case pass.
"""

from dataclasses import dataclass, replace

from watchdog.config import WatchdogConfig
from watchdog.floors import Floors
from watchdog.idle_floor import IdleFloor, Window, observe, opened
from watchdog.policy import decide, reload_done, start
from watchdog.sense import OURS, margin_of
from watchdog.snapshot import MIB, Holdings, Reading, Work
from watchdog.state import Decision, EnginePhase, PolicyState, View
from watchdog.trend import Trend, TrendClass, begin, extend, forecast, foreign_bytes


@dataclass(frozen=True, slots=True)
class DeviceWatch:
    """What is known of one device since ready."""

    floors: Floors
    idle: IdleFloor
    trend: Trend


@dataclass(frozen=True, slots=True)
class Watch:
    devices: tuple[DeviceWatch, ...]
    policy: PolicyState


def at_ready(
    readings: tuple[Reading, ...],
    floors: tuple[Floors, ...],
    holdings: tuple[Holdings, ...],
    before: Watch | None = None,
) -> Watch:
    """Everything anew with a new engine; `before` hands over what the policy must not forget."""
    devices = tuple(map(_begin, readings, floors, holdings))
    if before is None or not readings:
        return Watch(devices, start(len(devices)))
    idle = tuple(reading.free for reading in readings)
    return Watch(devices, reload_done(before.policy, readings[0].at, idle))


def step(
    watch: Watch,
    device: int,
    at: float,
    reading: Reading | None,
    work: Work,
    holdings: Holdings,
    config: WatchdogConfig,
    engine: EnginePhase = "serving",
) -> tuple[Watch, Decision]:
    """One sample of one device. `reading` is None when there is no fresh one: the device is blind."""
    own = watch.devices[device]
    if reading is not None and engine == "serving":
        idle, window = observe(own.idle, reading, work, holdings)
        if idle is not own.idle:
            own = DeviceWatch(own.floors, idle, own.trend if window is None else extend(own.trend, window))
    policy, decision = decide(watch.policy, view(own, device, at, reading, work, holdings, engine), config)
    devices = watch.devices
    if own is not devices[device]:
        devices = (*devices[:device], own, *devices[device + 1 :])
    return Watch(devices, policy), decision


def view(
    own: DeviceWatch,
    device: int,
    at: float,
    reading: Reading | None,
    work: Work,
    holdings: Holdings,
    engine: EnginePhase = "serving",
) -> View:
    """What the policy, the metrics and the page see of a device."""
    idle_free = own.idle.idle_free(holdings.released)
    known = own.idle.known
    kind, near, foreign = own.trend.kind, None, None
    if known is not None and idle_free is not None:
        foreign = foreign_bytes(own.trend, known.free, known.own)
        if kind in (TrendClass.FLAT, TrendClass.FIRST_USE) and _taken_by_others(own.trend, known, foreign):
            kind = TrendClass.FOREIGN
        if kind in (TrendClass.GROWTH, TrendClass.FILL):
            elastic = holdings.elastic.releasable(keep_half=True)
            near = forecast(own.trend, idle_free - own.floors.reload, work.finished - known.finished, elastic)
    return View(
        at=at,
        device=device,
        floors=own.floors,
        holdings=holdings,
        free=None if reading is None else reading.free,
        idle_free=idle_free,
        kind=kind,
        bytes_per_second=own.trend.bytes_per_second,
        forecast=near,
        fill_owner=None if own.trend.fill is None else own.trend.fill.owner,
        foreign=foreign,
        idle_for=None if work.idle_since is None else at - work.idle_since,
        engine=engine,
    )


def has_room(own: DeviceWatch, holdings: Holdings) -> bool:
    """Whether elastic memory could grow here: more is free than at ready, and nothing of ours is eating it up."""
    idle_free = own.idle.idle_free(holdings.released)
    if idle_free is None or own.trend.kind in OURS:
        return False
    return idle_free - own.floors.baseline >= margin_of(own.floors)


def with_policy(watch: Watch, policy: PolicyState) -> Watch:
    return replace(watch, policy=policy)


def _begin(reading: Reading, floors: Floors, holdings: Holdings) -> DeviceWatch:
    ready = Window(reading.at, 0, 0, reading.free, reading.own, holdings.capped)
    return DeviceWatch(floors, opened(reading.at, Work(0, 0, 0, boundary=True), ready), begin(ready))


def _taken_by_others(trend: Trend, known: Window, foreign: int | None) -> bool:
    """Free memory fell while own bytes did not: others hold at least half of what is missing, and enough to matter."""
    missing = trend.ready.free - known.free
    return foreign is not None and missing > 0 and foreign >= max(16 * MIB, missing // 2)
