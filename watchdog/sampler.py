"""The one thread that reads the source, and the immutable snapshots that it publishes.

Every device is read by itself: one that fails or is slow is blind, the others are not. A call that takes longer than
2 s makes its device blind while it lasts and afterwards; nobody starts a second thread for it, and whoever looks at
the snapshot sees the ages grow. A failing device gets at most a tenth of the thread's time.

The memory figures are cheap and read each time: every second, and faster as room shrinks. The process list is not: it
is read every few seconds, on request, and when free memory has moved.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from watchdog.attribution import NO_SPLIT, UNKNOWN, Ours, Split, split
from watchdog.floors import Floors
from watchdog.snapshot import MIB, DeviceSnapshot, Health, Reading, Snapshot
from watchdog.source import Holders, Source, SourceError

SLOW_CALL_S = 2.0
SLOWEST_S, FASTEST_S = 1.0, 0.05
LIST_EVERY_S, LIST_LEAST_S = 5.0, 1.0
MOVED = 16 * MIB
"""Free memory that has changed by so much since the last look at the process list is worth another."""
LONGEST_PAUSE_S = 60.0

FALLBACKS = ("nvml_v1", "runtime", "system")


@dataclass(frozen=True, slots=True)
class Pace:
    """A device is read every second above `relaxed` free bytes, every 50 ms under `urgent`, and in between between."""

    urgent: int
    relaxed: int


def pace_of(floors: Floors) -> Pace:
    """Fastest under the reload floor, slow from twice the warn floor on; a tight device goes by what it began with."""
    if floors.tight:
        return Pace(min(floors.hold_under, floors.baseline // 2), floors.baseline)
    return Pace(floors.reload, 2 * floors.warn)


def interval_s(free: int, pace: Pace) -> float:
    """Seconds until the next sample."""
    share = (free - pace.urgent) / max(1, pace.relaxed - pace.urgent)
    return FASTEST_S + (SLOWEST_S - FASTEST_S) * min(1.0, max(0.0, share))


@dataclass(slots=True)
class _Seat:
    """What the thread keeps of one device between samples."""

    shown: DeviceSnapshot
    retry_at: float = 0.0
    listed_at: float | None = None
    listed_free: int = 0
    parts: Split = NO_SPLIT


class Sampler:
    """Samples `source`, which it owns from here on. `clock` gives the times of all readings, in seconds."""

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        nothing = Health(attempted_at=clock(), succeeded_at=None, duration_s=0.0)
        self._seats = [
            _Seat(DeviceSnapshot(device, card.uuid, card.name, None, nothing))
            for device, card in enumerate(source.cards)
        ]
        self._shown = Snapshot(0, clock(), tuple(seat.shown for seat in self._seats))
        self._paces: dict[int, Pace] = {}
        self._ours = self._seen = UNKNOWN
        self._list_asked = self._lowest_asked = False
        self._call: tuple[int, float] | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, publish: Callable[[Snapshot], None] | None = None) -> None:
        """Start the thread. It calls `publish` with every snapshot."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(publish,), name="vram-sampler", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = SLOW_CALL_S) -> bool:
        """End the thread; it closes the source. False if it is still inside a call: it ends when that returns."""
        self._stopping = True
        self._wake.set()
        if self._thread is None:
            self._source.close()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def now(self) -> float:
        """The clock of all readings."""
        return self._clock()

    def snapshot(self) -> Snapshot:
        """The latest snapshot. A device inside a call that has taken too long is shown as failing."""
        shown, call = self._shown, self._call
        if call is None or (lasted := self._clock() - call[1]) <= SLOW_CALL_S:
            return shown
        device = shown.devices[call[0]]
        health = replace(device.health, failures=device.health.failures + 1, error=f"a call has taken {lasted:.1f} s")
        devices = list(shown.devices)
        devices[call[0]] = replace(device, health=health)
        return replace(shown, devices=tuple(devices))

    def request(self, *, processes: bool = False) -> None:
        """Sample now, and look at the process list too if asked. Before and after an act, say."""
        self._list_asked = self._list_asked or processes
        self._wake.set()

    def attribute(self, ours: Ours) -> None:
        """From the next sample on these processes are our own."""
        if ours != self._ours:
            self._ours = ours
            self.request(processes=True)

    def keep_pace(self, device: int, pace: Pace) -> None:
        self._paces[device] = pace

    def forget_lowest(self) -> None:
        """The lowest free memory counts anew: a new engine is ready."""
        self._lowest_asked = True

    def sample(self) -> Snapshot:
        """Read every device once and publish. For the thread, and for those who have none."""
        began = self._clock()
        asked, self._list_asked = self._list_asked, False
        if self._lowest_asked:
            self._lowest_asked = False
            for seat in self._seats:
                seat.shown = replace(seat.shown, lowest_free=None)
        for device, seat in enumerate(self._seats):
            self._visit(device, seat, asked)
        self._shown = Snapshot(self._shown.sequence + 1, began, tuple([seat.shown for seat in self._seats]))
        return self._shown

    def interval_s(self) -> float:
        """Until the next sample: what the device with the least room asks for."""
        waits = [SLOWEST_S]
        for device, pace in list(self._paces.items()):
            shown = self._seats[device].shown
            if shown.reading is not None and shown.health.failures == 0:
                waits.append(interval_s(shown.reading.free, pace))
        return min(waits)

    def _run(self, publish: Callable[[Snapshot], None] | None) -> None:
        try:
            while not self._stopping:
                began = self._clock()
                self._wake.clear()
                snapshot = self.sample()
                if publish is not None:
                    publish(snapshot)
                self._wake.wait(max(0.0, self.interval_s() - (self._clock() - began)))
        finally:
            self._source.close()

    def _visit(self, device: int, seat: _Seat, list_asked: bool) -> None:
        at = self._clock()
        if at < seat.retry_at:
            return
        reading, error = None, None
        self._call = (device, at)
        try:
            reading = self._read(device, seat, at, list_asked)
        except SourceError as failure:
            error = str(failure)
        finally:
            self._call = None
        took = self._clock() - at
        if took > SLOW_CALL_S:
            reading, error = None, f"a call took {took:.1f} s"
        if reading is None:
            seat.retry_at = at + took + min(max(SLOWEST_S, 10.0 * took), LONGEST_PAUSE_S)
        seat.shown = _shown(seat.shown, at, took, reading, error)

    def _read(self, device: int, seat: _Seat, at: float, list_asked: bool) -> Reading:
        reading = self._source.read(device, at)
        if list_asked or self._list_due(device, seat, reading):
            holders = self._source.holders(device)
            seat.listed_at, seat.listed_free = at, reading.free
            seat.parts = self._split(holders, reading.used)
            seat.shown = replace(seat.shown, holders=holders)
        parts = seat.parts
        if parts.source == "none":
            return reading
        return _with(reading, parts)

    def _list_due(self, device: int, seat: _Seat, reading: Reading) -> bool:
        if seat.listed_at is None:
            return True
        since = reading.at - seat.listed_at
        pace = self._paces.get(device)
        every = LIST_EVERY_S if pace is None else max(LIST_LEAST_S, LIST_EVERY_S * interval_s(reading.free, pace))
        return since >= every or (since >= LIST_LEAST_S and abs(reading.free - seat.listed_free) >= MOVED)

    def _split(self, holders: Holders | None, used: int | None) -> Split:
        ours = self._ours
        if holders is not None and not ours.pids.isdisjoint(holders):
            self._seen = ours
        return split(ours, holders, used, seen=self._seen is ours)


def _with(reading: Reading, parts: Split) -> Reading:
    """dataclasses.replace, at a third of its price: this is most of what a sample costs."""
    return Reading(
        reading.at,
        reading.total,
        reading.free,
        reading.used,
        reading.reserved,
        parts.own,
        parts.other,
        reading.source,
        parts.source,
    )


def _shown(last: DeviceSnapshot, at: float, took: float, reading: Reading | None, error: str | None) -> DeviceSnapshot:
    """The device after one more attempt. A failure keeps the last reading, which is then no longer fresh."""
    health = last.health
    failed = reading is None
    fell_back = reading is not None and reading.source in FALLBACKS
    lowest = last.lowest_free
    if reading is not None:
        lowest = reading.free if lowest is None else min(lowest, reading.free)
    return DeviceSnapshot(
        last.device,
        last.uuid,
        last.name,
        reading or last.reading,
        Health(
            attempted_at=at,
            succeeded_at=health.succeeded_at if failed else at,
            duration_s=took,
            failures=health.failures + 1 if failed else 0,
            failures_total=health.failures_total + failed,
            samples_total=health.samples_total + 1,
            error=error,
            fallbacks_total=health.fallbacks_total + fell_back,
        ),
        lowest,
        last.holders,
    )
