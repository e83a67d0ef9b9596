"""Trims since the service started; never goes down. Reloads, and what requests feel of them, the service counts itself.

All label values are closed sets and exist at zero from the start: a series that first appears at 1 never fires an
alert on its increase.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, product

from watchdog.actions import TRIMS, Result, Rung

Labels = tuple[str, ...]

RESULTS: tuple[Result, ...] = ("ok", "noop", "failed")
TRIM_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)


class Histogram:
    """Counts by bucket; a bound is inclusive."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class Counts:
    """Counters by label values; `devices` are the numbers of the devices there are. Used by one thread."""

    def __init__(self, devices: int) -> None:
        numbers = [str(device) for device in range(devices)]
        rungs = [str(rung) for rung in TRIMS]
        self.trims = _zero(numbers, rungs, RESULTS)
        self.trim_returned = _zero(numbers, rungs)
        self.trim_seconds = _empty(TRIM_S, rungs)

    def trimmed(self, device: int, rung: Rung, result: Result, returned: int, seconds: float) -> None:
        """One rung was taken; `returned` bytes are what the source measured."""
        _add(self.trims, (str(device), str(rung), result), 1)
        _add(self.trim_returned, (str(device), str(rung)), max(0, returned))
        self.trim_seconds[(str(rung),)].observe(seconds)


def _zero(*words: Sequence[str]) -> dict[Labels, int]:
    return dict.fromkeys(product(*words), 0)


def _empty(bounds: Sequence[float], *words: Sequence[str]) -> dict[Labels, Histogram]:
    return {labels: Histogram(bounds) for labels in product(*words)}


def _add(counter: dict[Labels, int], labels: Labels, amount: int) -> None:
    assert labels in counter, f"{labels} was not created at zero"
    counter[labels] += amount
