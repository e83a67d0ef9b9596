"""Free memory, idle floor and floors of each device over the last hours, so that a page opened at night shows the fall.

One point every few seconds. Of what was read in between it keeps the lowest free memory, and the rest as it was last.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from watchdog.status import DeviceStatus, Status

EVERY_S = 10
HOURS = 6


@dataclass(frozen=True, slots=True)
class Point:
    """One device. Bytes; None is unknown."""

    free: int | None
    idle_free: int | None
    warn: int | None
    trim: int | None
    reload: int | None


@dataclass(frozen=True, slots=True)
class Moment:
    """`slot` counts periods of EVERY_S since the epoch."""

    slot: int
    wall: float
    devices: Mapping[int, Point]


class History:
    def __init__(self) -> None:
        self._moments: deque[Moment] = deque(maxlen=HOURS * 3600 // EVERY_S)

    def add(self, status: Status) -> None:
        """Take in how things are; any number of times a period."""
        slot = int(status.wall // EVERY_S)
        before: Mapping[int, Point] = {}
        if self._moments and self._moments[-1].slot == slot:
            before = self._moments.pop().devices
        points = {device.device: _point(device, before.get(device.device)) for device in status.devices}
        self._moments.append(Moment(slot, status.wall, points))

    def json(self) -> dict[str, Any]:
        """By device and column, as a chart wants it; unknown is null."""
        numbers = sorted({device for moment in self._moments for device in moment.devices})
        return {"every_seconds": EVERY_S, "devices": [self._columns(device) for device in numbers]}

    def _columns(self, device: int) -> dict[str, Any]:
        known = [(moment.wall, moment.devices[device]) for moment in self._moments if device in moment.devices]
        columns = {name: [getattr(point, name) for _, point in known] for name in Point.__slots__}
        return {"device": device, "time": [round(wall, 1) for wall, _ in known], **columns}


def _point(device: DeviceStatus, before: Point | None) -> Point:
    free = None if device.reading is None else device.reading.free
    if before is not None and before.free is not None:
        free = before.free if free is None else min(free, before.free)
    floors = device.floors
    return Point(
        free,
        device.idle_free,
        *((None, None, None) if floors is None else (floors.warn, floors.trim, floors.reload)),
    )
