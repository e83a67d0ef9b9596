"""Whose bytes are ours: process ids, how far they can be trusted, and the descendants of an engine that is not ours.

NVML speaks of processes by the ids of the host. In a container these are other numbers than ours, and may by accident
be equal to ours. So there ids count only after a handshake: the engine maps and unmaps memory of distinct sizes, and
the process that grows and shrinks by them is the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from watchdog.snapshot import GRANULE, OwnSource
from watchdog.source import Holders

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the host's own namespace is a constant of Linux (include/linux/proc_ns.h)."""


@dataclass(frozen=True, slots=True)
class Ours:
    """Process ids, in the source's terms, whose memory is our own; and how they are known."""

    pids: frozenset[int]
    source: OwnSource


UNKNOWN = Ours(frozenset(), "none")


def engine_process(pid: int, source: OwnSource) -> Ours:
    """Our child, whose id the source uses too unless this is a container: then a handshake must tell."""
    if source == "simulated" or Path("/proc/self/ns/pid").stat().st_ino == INITIAL_PID_NAMESPACE:
        return Ours(frozenset({pid}), source)
    return UNKNOWN


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the process list of a device during the handshake, while the engine holds `extra` bytes more."""

    extra: int
    holders: Holders


def shaken(looks: Sequence[Look]) -> Ours:
    """The one process whose bytes follow `extra` from look to look, each time to within one granule; else UNKNOWN."""
    if len({look.extra // GRANULE for look in looks}) < 2:
        return UNKNOWN
    everywhere = set(looks[0].holders).intersection(*(look.holders for look in looks[1:]))
    found = [pid for pid in everywhere if _follows(pid, looks)]
    return Ours(frozenset(found), "host_pid") if len(found) == 1 else UNKNOWN


def _follows(pid: int, looks: Sequence[Look]) -> bool:
    sizes = [look.holders[pid] for look in looks]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return False
    rests = [size - look.extra for size, look in zip(known, looks, strict=True)]
    return max(rests) - min(rests) <= GRANULE


@dataclass(frozen=True, slots=True)
class Split:
    """Own and other bytes of a device; None is unknown."""

    own: int | None = None
    other: int | None = None
    source: OwnSource = "none"


NO_SPLIT = Split()


def split(ours: Ours, holders: Holders | None, used: int | None, *, seen: bool) -> Split:
    """`used` is None where the source tells no such figure. `seen`: some of our processes was listed before.

    With NVML a process that never was in a list may be there under another number: unknown. One that was and is no
    more holds nothing.
    """
    if holders is None or ours.source == "none":
        return NO_SPLIT
    listed = [holders[pid] for pid in ours.pids if pid in holders]
    if not listed and not seen and ours.source != "simulated":
        return NO_SPLIT
    own = _sum(listed)
    if own is None:
        return NO_SPLIT
    others = _sum([size for pid, size in holders.items() if pid not in ours.pids])
    other = others if used is None else max(0, used - own)  # the two figures are a moment apart
    return Split(own, other, ours.source)


def _sum(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def family(pid: int) -> frozenset[int]:
    """A process and its descendants: engines of others often hold their memory in workers. Empty if it has ended."""
    if not Path(f"/proc/{pid}").exists():
        return frozenset()
    children: Mapping[int, list[int]] = _children()
    found, todo = set[int](), [pid]
    while todo:
        here = todo.pop()
        found.add(here)
        todo.extend(child for child in children.get(here, []) if child not in found)
    return frozenset(found)


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        parent = int(stat.rpartition(b")")[2].split()[1])
        children.setdefault(parent, []).append(int(entry.name))
    return children
