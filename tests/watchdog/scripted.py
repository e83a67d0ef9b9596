"""A source of two devices whose figures, failures and slowness a test sets; it has the clock as well."""

import threading

from watchdog.snapshot import GIB, MemorySource, Reading
from watchdog.source import Card, Holders, SourceError


class Scripted:
    def __init__(self) -> None:
        self.now = 100.0
        self.cards = (Card("GPU-0", "card"), Card("GPU-1", "card"))
        self.free = [4 * GIB, 4 * GIB]
        self.broken: dict[int, str] = {}
        self.takes = {0: 0.0, 1: 0.0}
        self.held: Holders | None = {7: GIB, 9: GIB}
        self.source: MemorySource = "nvml"
        self.reads, self.lists, self.closed_by = [0, 0], [0, 0], ""

    def clock(self) -> float:
        return self.now

    def read(self, device: int, at: float) -> Reading:
        self.reads[device] += 1
        self.now += self.takes[device]
        if device in self.broken:
            raise SourceError(self.broken[device])
        free = self.free[device]
        return Reading(at, 16 * GIB, free, 16 * GIB - free, 0, source=self.source)

    def holders(self, device: int) -> Holders | None:
        self.lists[device] += 1
        return self.held

    def close(self) -> None:
        self.closed_by = threading.current_thread().name
