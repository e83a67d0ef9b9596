"""What has happened since the service started: trims, reloads, what requests felt of them. Never goes down.

All label values are closed sets and exist at zero from the start: a series that first appears at 1 never fires an
alert on its increase.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, product

from watchdog.actions import TRIMS, Result, Rung

Labels = tuple[str, ...]

RESULTS: tuple[Result, ...] = ("ok", "noop", "failed")
RELOAD_REASONS = ("vram_floor", "vram_growth", "vram_forecast", "engine_fault", "operator")
RELOAD_RESULTS = ("ok", "failed", "aborted")
PHASES = ("drain", "checkpoint", "teardown", "load", "warmup", "replay", "total")
STAGES = ("queued", "prefill", "decode")
LOST_REASONS = ("reload", "engine_crash", "oom", "drain_timeout", "replay_mismatch", "engine_unavailable")

TRIM_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)
PHASE_S = (0.1, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
HELD_S = (0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)
GAP_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)


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
        self.reloads = _zero(RELOAD_REASONS, RELOAD_RESULTS)
        self.reload_seconds = _empty(PHASE_S, PHASES)
        self.reload_returned = _zero(numbers)
        self.replayed = _zero(STAGES)
        self.recomputed = _zero()
        self.lost = _zero(LOST_REASONS)
        self.held_seconds = _empty(HELD_S)
        self.gap_seconds = _empty(GAP_S)

    def trimmed(self, device: int, rung: Rung, result: Result, returned: int, seconds: float) -> None:
        """One rung was taken; `returned` bytes are what the source measured."""
        _add(self.trims, (str(device), str(rung), result), 1)
        _add(self.trim_returned, (str(device), str(rung)), max(0, returned))
        self.trim_seconds[(str(rung),)].observe(seconds)

    def reloaded(self, reason: str, result: str, phases: Mapping[str, float], returned: Mapping[int, int]) -> None:
        """A reload is over: seconds by phase, and the bytes that each device got back."""
        _add(self.reloads, (reason, result), 1)
        for phase, seconds in phases.items():
            self.reload_seconds[(phase,)].observe(seconds)
        for device, size in returned.items():
            _add(self.reload_returned, (str(device),), max(0, size))

    def request_replayed(self, stage: str, recomputed_tokens: int) -> None:
        """A request goes on with another engine, which had to prefill so many of its tokens again."""
        _add(self.replayed, (stage,), 1)
        self.recomputed[()] += recomputed_tokens

    def request_lost(self, reason: str) -> None:
        _add(self.lost, (reason,), 1)

    def request_held(self, seconds: float) -> None:
        self.held_seconds[()].observe(seconds)

    def stream_gap(self, seconds: float) -> None:
        """The longest silence inside one stream that has ended."""
        self.gap_seconds[()].observe(seconds)


def _zero(*words: Sequence[str]) -> dict[Labels, int]:
    return dict.fromkeys(product(*words), 0)


def _empty(bounds: Sequence[float], *words: Sequence[str]) -> dict[Labels, Histogram]:
    return {labels: Histogram(bounds) for labels in product(*words)}


def _add(counter: dict[Labels, int], labels: Labels, amount: int) -> None:
    assert labels in counter, f"{labels} was not created at zero"
    counter[labels] += amount
