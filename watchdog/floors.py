"""The three floors of a device, and how it leaves them again.

B is the idle free memory at ready, measured after a worst-case pass; R the reserve that the plan kept. With
E = min(R, B, 1 GiB):

    reload = max(0.25 E, largest late allocation in the plan, 64 MiB)
    trim   = max(0.45 E, reload + 16 MiB)
    warn   = max(0.60 E, trim + 16 MiB)
"""

from dataclasses import dataclass
from enum import IntEnum

from watchdog.config import FloorOverride
from watchdog.snapshot import GIB, MIB

LEAST_RELOAD = 64 * MIB
STEP = 16 * MIB


class Level(IntEnum):
    """How low a device is; a higher number is worse."""

    OK = 0
    WARN = 1
    TRIM = 2
    RELOAD = 3


@dataclass(frozen=True, slots=True)
class Floors:
    """Bytes of idle free memory. `largest_late` is the largest allocation the plan allows after ready."""

    warn: int
    trim: int
    reload: int
    baseline: int
    extent: int
    largest_late: int

    @property
    def tight(self) -> bool:
        """The device was under its own warn floor at ready: levels say nothing about it, only the trend does."""
        return self.baseline < self.warn

    @property
    def hold_under(self) -> int:
        """Raw free bytes under which a degraded device can take no new work."""
        return max(32 * MIB, self.largest_late)

    def level(self, free: int) -> Level:
        if free < self.reload:
            return Level.RELOAD
        if free < self.trim:
            return Level.TRIM
        return Level.WARN if free < self.warn else Level.OK

    def leave(self, level: Level) -> int:
        """Free bytes from which `level` is left: the next floor plus 10 %, at most half way from it to B."""
        upper = self.trim if level is Level.RELOAD else self.warn
        return min(upper + upper // 10, (upper + max(upper, self.baseline)) // 2)


def floors_of(baseline: int, reserve: int, largest_late: int = 0, override: FloorOverride | None = None) -> Floors:
    """Floors of one device from B, R and the plan, in bytes."""
    extent = min(reserve, baseline, GIB)
    if override is not None:
        return Floors(override.warn, override.trim, override.reload, baseline, extent, largest_late)
    reload = max(extent * 25 // 100, largest_late, LEAST_RELOAD)
    trim = max(extent * 45 // 100, reload + STEP)
    warn = max(extent * 60 // 100, trim + STEP)
    return Floors(warn, trim, reload, baseline, extent, largest_late)
