"""The idle floor: how much of a device is free when no request's transient memory is in the way.

The floor of a window is the highest free reading at step boundaries in it. A window closes when as many requests have
finished as were running at its start (1 to 8), or after 60 s if at least one has: it needs no idle moment. Readings
with a trim, load or shrink in flight do not count. Within a window readings are compared after taking out what trims
released or regrown memory took, so that a trim in the middle of a window is no rise and no fall.
"""

from dataclasses import dataclass

from watchdog.snapshot import CappedOwner, Holdings, Reading, Work

LONGEST_S = 60.0
MOST_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Window:
    """One closed window, described by its highest reading: when it was taken and after how many requests.

    `free` is idle free minus `released`, `own` is own bytes plus `released`: what trims did is no loss and no gain.
    """

    at: float
    finished: int
    prompt_tokens: int
    free: int
    own: int | None
    capped: tuple[CappedOwner, ...] = ()


@dataclass(frozen=True, slots=True)
class IdleFloor:
    """The open window, and `known`: the latest word on idle memory, a closed window's floor or a reading at rest."""

    opened_at: float
    opened_finished: int
    wanted: int
    best: Window | None = None
    known: Window | None = None

    def idle_free(self, released: int) -> int | None:
        """Idle free bytes with all that has been released by now; None until something is known."""
        return None if self.known is None else self.known.free + released


def opened(at: float, work: Work, known: Window | None) -> IdleFloor:
    return IdleFloor(at, work.finished, min(max(work.running, 1), MOST_REQUESTS), None, known)


def observe(floor: IdleFloor, reading: Reading, work: Work, holdings: Holdings) -> tuple[IdleFloor, Window | None]:
    """Take one reading in; the second value is the window that it closed."""
    best, known = floor.best, floor.known
    at_rest = work.boundary and work.running == 0
    if work.boundary:
        free = reading.free - holdings.released
        if best is None or free > best.free or at_rest:
            own = None if reading.own is None else reading.own + holdings.released
            here = Window(reading.at, work.finished, work.prompt_tokens, free, own, holdings.capped)
            if best is None or free > best.free:
                best = here
            if at_rest or known is None or free > known.free:
                # At rest this is idle memory itself; and so much free now proves that a lower floor was a busy window.
                known = here
    finished = work.finished - floor.opened_finished
    overdue = finished >= 1 and reading.at - floor.opened_at >= LONGEST_S
    if best is None or not (finished >= floor.wanted or overdue):
        if best is floor.best and known is floor.known:
            return floor, None
        return IdleFloor(floor.opened_at, floor.opened_finished, floor.wanted, best, known), None
    return opened(reading.at, work, known if at_rest else best), best
