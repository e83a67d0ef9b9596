"""The ladder's memory: where the present climb is, when the last one ended, and which rungs are known to be empty.

A rung that returned nothing twice is skipped until conditions change: another engine, or another amount held by the
owner that the rung draws on.
"""

from dataclasses import dataclass

from watchdog.actions import Rung
from watchdog.snapshot import GRANULE, Holdings

EMPTY_TWICE = 2

DRAWS_ON = {
    Rung.POOLS: ("pool_cached",),
    Rung.STACK_LIMIT: ("context",),
    Rung.CUBLAS_WORKSPACE: ("cublas_workspace",),
    Rung.GRAPH_CACHE: ("cuda_graphs",),
    Rung.ELASTIC: ("shadow", "kv_cache"),
}
"""The owners of the ledger that can shrink when a rung is taken."""

Conditions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Empty:
    """A rung returned nothing `times` times under `conditions`."""

    rung: Rung
    times: int
    conditions: Conditions


@dataclass(frozen=True, slots=True)
class Ladder:
    """`taken` are the rungs of the climb in progress, None between climbs."""

    taken: tuple[Rung, ...] | None = None
    ended_at: float | None = None
    empties: tuple[Empty, ...] = ()

    @property
    def climbing(self) -> bool:
        return self.taken is not None

    def cooling(self, now: float, cooldown_s: float) -> bool:
        return self.taken is None and self.ended_at is not None and now - self.ended_at < cooldown_s


def conditions(rung: Rung, holdings: Holdings) -> Conditions:
    held = (holdings.ledger[owner] // GRANULE if owner in holdings.ledger else -1 for owner in DRAWS_ON[rung])
    return (holdings.generation, *held)


def next_rung(ladder: Ladder, allowed: tuple[Rung, ...], holdings: Holdings) -> Rung | None:
    """The next rung of this climb, or of a new one, that is not known to be empty; None when the top is reached."""
    for rung in allowed:
        if ladder.taken is not None and rung in ladder.taken:
            continue
        if not _known_empty(ladder, rung, holdings):
            return rung
    return None


def take(ladder: Ladder, rung: Rung) -> Ladder:
    return Ladder((*(ladder.taken or ()), rung), ladder.ended_at, ladder.empties)


def end(ladder: Ladder, at: float) -> Ladder:
    """The climb is over, by the top or because the device has left its level: the cool-down begins."""
    return Ladder(None, at, ladder.empties) if ladder.taken is not None else ladder


def remember(ladder: Ladder, rung: Rung, returned: int, holdings: Holdings) -> Ladder:
    """The ladder after `rung` returned so many bytes. A failure is remembered like an empty rung."""
    others = tuple(empty for empty in ladder.empties if empty.rung is not rung)
    if returned >= GRANULE:
        return Ladder(ladder.taken, ladder.ended_at, others)
    now = conditions(rung, holdings)
    before = next((empty for empty in ladder.empties if empty.rung is rung and empty.conditions == now), None)
    times = 1 if before is None else before.times + 1
    return Ladder(ladder.taken, ladder.ended_at, (*others, Empty(rung, times, now)))


def _known_empty(ladder: Ladder, rung: Rung, holdings: Holdings) -> bool:
    return any(
        empty.rung is rung and empty.times >= EMPTY_TWICE and empty.conditions == conditions(rung, holdings)
        for empty in ladder.empties
    )
