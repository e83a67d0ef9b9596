"""What a device's idle free memory is doing, from its closed windows since ready, and when it reaches a floor.

The series is idle free memory with trims taken out (idle_floor.py). Where own bytes are known they stand in for it,
mirrored: a neighbour that comes or goes then moves nothing, and what it took is judged apart (`foreign_bytes`).
Slopes are losses: positive means that room shrinks.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from watchdog.idle_floor import Window
from watchdog.robust import (
    Floats,
    agreement,
    falls_since_rise,
    mann_kendall,
    median,
    noise,
    theil_sen,
    without_steps,
)
from watchdog.snapshot import GRANULE, MIB

REQUESTS = 64
CONFIDENT = 0.5
"""Below it the forecast is withheld."""
FALLS = 3
"""Separate falls without a rise between them are growth, whatever the slope says."""


class TrendClass(StrEnum):
    FLAT = "flat"
    FIRST_USE = "first_use"
    GROWTH = "growth"
    FILL = "fill"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Fill:
    """What rises towards a cap: a named owner, or None when only the shape of the fall says so."""

    owner: str | None
    remaining: float


@dataclass(frozen=True, slots=True)
class Trend:
    """The verdict over the last 64 requests. `points` starts with the reading at ready."""

    points: tuple[Window, ...]
    kind: TrendClass = TrendClass.FLAT
    bytes_per_request: float | None = None
    bytes_per_second: float | None = None
    confidence: float = 0.0
    fill: Fill | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a floor is reached at the present slope; 0 when it already is."""

    requests: float
    seconds: float


def begin(ready: Window) -> Trend:
    """A trend starts anew at each ready, with the reading after the worst-case pass as its first point."""
    return Trend((ready,))


def recent(points: tuple[Window, ...]) -> tuple[Window, ...]:
    """The windows of the last 64 requests."""
    since = points[-1].finished - REQUESTS
    return tuple(point for point in points if point.finished >= since)


def extend(trend: Trend, window: Window) -> Trend:
    """The trend with one more closed window; all else is computed anew from the points."""
    points = (*trend.points[-REQUESTS:], window)
    looked_at = recent(points)
    if len(looked_at) < FALLS + 1:
        return Trend(points)
    known = all(point.own is not None for point in points)
    every = _series(points, known)
    x = np.array([point.finished for point in looked_at], dtype=np.float64)
    y = every[-len(looked_at) :]
    threshold = max(float(GRANULE), 4.5 * noise(every), _doubt(len(points)))
    falls, _ = falls_since_rise(y, threshold)
    level, steps = without_steps(y, threshold, FALLS - 1)
    grows = falls >= FALLS or _declines(x, level, threshold)
    if not grows:
        kind = TrendClass.FLAT if falls == 0 else TrendClass.FIRST_USE if known else TrendClass.UNKNOWN
        return Trend(points, kind, -theil_sen(x, y), _per_second(looked_at, y))
    shaped = _shaped_fill(level, threshold)
    if steps and not _declines(x, level, threshold) and falls_since_rise(level, threshold)[0] < FALLS - 1:
        level, shaped = y, None  # the steps are nearly all there is: they are the growth
    slope = -theil_sen(x, level)
    if slope <= 0.0:
        slope = max(0.0, float(level[0] - level[-1]) / max(1.0, float(x[-1] - x[0])))
    fill = _owned_fill(looked_at, x, y, threshold) or shaped
    kind = TrendClass.GROWTH if fill is None else TrendClass.FILL
    requests_per_second = float(x[-1] - x[0]) / max(1e-9, looked_at[-1].at - looked_at[0].at)
    per_second = _per_second(looked_at, level)
    if per_second <= 0.0:  # most pairs lie on plateaus
        per_second = slope * requests_per_second
    return Trend(points, kind, slope, per_second, agreement(x, level, -slope), fill)


def forecast(trend: Trend, room: float, requests_since: int = 0, elastic: int = 0) -> Forecast | None:
    """When `room` bytes, and `elastic` bytes that may still be released, are used up.

    `requests_since` have finished since the room was measured: at the present slope they have taken their share.
    None when the class promises no further fall, when the slope is not confident, or when a fill ends before.
    """
    slope, rate = trend.bytes_per_request, trend.bytes_per_second
    if trend.kind not in (TrendClass.GROWTH, TrendClass.FILL) or trend.confidence < CONFIDENT:
        return None
    if not slope or slope <= 0.0 or not rate or rate <= 0.0:
        return None
    if trend.fill is not None and trend.fill.remaining <= room + elastic:
        return None
    left = max(0.0, room + elastic - slope * requests_since)
    return Forecast(left / slope, left / rate)


def foreign_bytes(trend: Trend, free: int, own: int | None) -> int | None:
    """What others hold more than at ready, in bytes, given idle `free` and `own` as in a Window; None if unknown."""
    ready = trend.points[0]
    if ready.own is None or own is None:
        return None
    return ready.free + ready.own - free - own


def bytes_per_1k_tokens(trend: Trend) -> float | None:
    """Loss per 1,000 prompt tokens over the last 64 requests; computed when asked for, the policy has no use for it."""
    points = recent(trend.points)
    if len(points) < FALLS + 1:
        return None
    tokens = np.array([point.prompt_tokens for point in points], dtype=np.float64)
    return -1000.0 * theil_sen(tokens, _series(points, all(point.own is not None for point in points)))


def _series(points: tuple[Window, ...], known: bool) -> Floats:
    if known:
        return -np.array([point.own for point in points], dtype=np.float64)
    return np.array([point.free for point in points], dtype=np.float64)


def _doubt(n: int) -> float:
    """Least fall that counts while too few points are there to know the noise."""
    return max(0.0, (9 - n) * 4.0 * MIB)


def _declines(x: Floats, y: Floats, threshold: float) -> bool:
    """A steady fall: nearly all pairs agree, and it adds up to more than what noise does."""
    n = len(y)
    if n < 7:
        return False
    surest = (n * (n - 1) / 2 - 1) / (n * (n - 1) * (2 * n + 5) / 18) ** 0.5
    if mann_kendall(y) > -min(4.0, 0.97 * surest):
        return False
    return -theil_sen(x, y) * float(x[-1] - x[0]) >= max(2.0 * GRANULE, threshold)


def _per_second(points: tuple[Window, ...], y: Floats) -> float:
    return -theil_sen(np.array([point.at for point in points], dtype=np.float64), y)


def _owned_fill(points: tuple[Window, ...], x: Floats, y: Floats, threshold: float) -> Fill | None:
    """The fall is a fill if nothing is left of it once the growth of capped owners is taken out."""
    held: dict[str, int] = {owner.owner: -owner.held for owner in points[0].capped}
    for owner in points[-1].capped:
        held[owner.owner] = held.get(owner.owner, 0) + owner.held
    if not any(gain > threshold / 2 for gain in held.values()):
        return None
    rest = y + np.array([sum(owner.held for owner in point.capped) for point in points], dtype=np.float64)
    if falls_since_rise(rest, threshold)[0] >= FALLS or _declines(x, rest, threshold):
        return None
    remaining = sum(owner.cap - owner.held for owner in points[-1].capped if held[owner.owner] > 0)
    return Fill(max(held, key=lambda owner: held[owner]), float(remaining))


def _shaped_fill(level: Floats, threshold: float) -> Fill | None:
    """A fall whose later half is much smaller than its earlier one approaches a cap, as 1 - exp does."""
    n = len(level)
    if n < 9:
        return None
    few = max(1, n // 8)
    middle = median(level[n // 2 - few // 2 : n // 2 + (few + 1) // 2])
    earlier, later = median(level[:few]) - middle, middle - median(level[-few:])
    if earlier < 2.0 * threshold or later > 0.4 * earlier:
        return None
    ratio = max(0.0, later) / earlier
    return Fill(None, 1.5 * max(0.0, later) * ratio / (1.0 - ratio) + threshold)
