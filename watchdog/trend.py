"""What a device's idle free memory is doing, from its closed windows since ready, and when it reaches a floor.

The series is idle free memory with trims taken out (idle_floor.py). Where own bytes are known they stand in for it,
mirrored: a neighbour that comes or goes then moves nothing, and what it took is judged apart (`foreign_bytes`).
Slopes are losses: positive means that room shrinks.
"""

from bisect import bisect_left
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
SIGMAS = 5.0
"""A change of level counts from so many standard deviations of one window's floor."""
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
    """The verdict over the last 64 requests; slopes are None unless there is growth or a fill.

    `points` are the last windows since ready, the reading at ready being the first of all.
    """

    ready: Window
    points: tuple[Window, ...]
    kind: TrendClass = TrendClass.FLAT
    bytes_per_request: float | None = None
    bytes_per_second: float | None = None
    confidence: float = 0.0
    fill: Fill | None = None


@dataclass(frozen=True, slots=True)
class Slopes:
    """Bytes lost per request, per 1,000 prompt tokens and per second (an hour is 3,600 times that)."""

    per_request: float
    per_1k_tokens: float
    per_second: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a floor is reached at the present slope; 0 when it already is."""

    requests: float
    seconds: float


def begin(ready: Window) -> Trend:
    """A trend starts anew at each ready, with the reading after the worst-case pass as its first point."""
    return Trend(ready, (ready,))


def recent(points: tuple[Window, ...]) -> tuple[Window, ...]:
    """The windows of the last 64 requests."""
    return points[bisect_left(points, points[-1].finished - REQUESTS, key=_finished) :]


def extend(trend: Trend, window: Window) -> Trend:
    """The trend with one more closed window; all else is computed anew from the points."""
    points = (*trend.points[-REQUESTS:], window)
    looked_at = recent(points)
    if len(looked_at) < FALLS + 1:
        return Trend(trend.ready, points)
    known = _known(points)
    every = _series(points, known)
    x = np.array([point.finished for point in looked_at], dtype=np.float64)
    y = every[-len(looked_at) :]
    threshold = max(float(GRANULE), SIGMAS * noise(every), _doubt(len(points)))
    falls, _ = falls_since_rise(y, threshold)
    level, steps = without_steps(y, threshold, FALLS - 1)
    if falls >= FALLS or _declines(x, level, threshold) or _goes_on(points, x, every, level, threshold):
        return _growth(trend.ready, points, looked_at, x, y, level, steps, threshold)
    if falls == 0:
        return Trend(trend.ready, points)
    return Trend(trend.ready, points, TrendClass.FIRST_USE if known else TrendClass.UNKNOWN)


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
    ready = trend.ready
    if ready.own is None or own is None:
        return None
    return ready.free + ready.own - free - own


def slopes(trend: Trend) -> Slopes | None:
    """Losses over the last 64 requests as they are shown; computed when asked for. None while there are too few."""
    points = recent(trend.points)
    if len(points) < FALLS + 1:
        return None
    y = _series(points, _known(points))
    finished = np.array([point.finished for point in points], dtype=np.float64)
    tokens = np.array([point.prompt_tokens for point in points], dtype=np.float64)
    at = np.array([point.at for point in points], dtype=np.float64)
    per_request, per_second = trend.bytes_per_request, trend.bytes_per_second
    return Slopes(
        per_request=-theil_sen(finished, y) if per_request is None else per_request,
        per_1k_tokens=-1000.0 * theil_sen(tokens, y),
        per_second=-theil_sen(at, y) if per_second is None else per_second,
    )


def _growth(
    ready: Window,
    points: tuple[Window, ...],
    looked_at: tuple[Window, ...],
    x: Floats,
    y: Floats,
    level: Floats,
    steps: int,
    threshold: float,
) -> Trend:
    """Growth or fill, with slopes; `level` is `y` without the `steps` that are apart from the trend."""
    shaped = _shaped_fill(level, threshold)
    if steps and not _declines(x, level, threshold) and falls_since_rise(level, threshold)[0] < FALLS - 1:
        level, shaped = y, None  # the steps are nearly all there is: they are the growth
    at = np.array([point.at for point in looked_at], dtype=np.float64)
    slope, per_second = -theil_sen(x, level), -theil_sen(at, level)
    if slope <= 0.0:  # most pairs lie on plateaus
        slope = max(0.0, float(level[0] - level[-1]) / max(1.0, float(x[-1] - x[0])))
    if per_second <= 0.0:
        per_second = slope * float(x[-1] - x[0]) / max(1e-9, float(at[-1] - at[0]))
    fill = _owned_fill(looked_at, x, y, threshold) or shaped
    kind = TrendClass.GROWTH if fill is None else TrendClass.FILL
    return Trend(ready, points, kind, slope, per_second, agreement(x, level, -slope), fill)


def _known(points: tuple[Window, ...]) -> bool:
    return None not in [point.own for point in points]


def _finished(point: Window) -> int:
    return point.finished


def _series(points: tuple[Window, ...], known: bool) -> Floats:
    if known:
        return -np.array([point.own for point in points], dtype=np.float64)
    return np.array([point.free for point in points], dtype=np.float64)


def _doubt(n: int) -> float:
    """Least fall that counts while too few points are there to know the noise."""
    return max(0.0, (16 - n) * 1.5 * MIB)


def _declines(x: Floats, y: Floats, threshold: float) -> bool:
    """A steady fall: nearly all pairs agree, and it adds up to more than what noise does."""
    n = len(y)
    if n < 7:
        return False
    third = n // 3
    if median(y[:third]) - median(y[-third:]) < 0.25 * threshold:
        return False  # cheap, and true of nearly every series that does not fall
    surest = (n * (n - 1) / 2 - 1) / (n * (n - 1) * (2 * n + 5) / 18) ** 0.5
    if mann_kendall(y) > -min(4.0, 0.9 * surest):
        return False
    return -theil_sen(x, y) * float(x[-1] - x[0]) >= max(2.0 * GRANULE, threshold)


def _goes_on(points: tuple[Window, ...], x: Floats, every: Floats, level: Floats, threshold: float) -> bool:
    """A fall too slow for 64 requests to show, as with many streams they are 8 windows: more windows show it.

    It counts only while the last 64 requests fall as fast as the longer series does.
    """
    if len(points) < 2 * len(x):
        return False
    longer, _ = without_steps(every, threshold, FALLS - 1)
    finished = np.array([point.finished for point in points], dtype=np.float64)
    if not _declines(finished, longer, threshold):
        return False
    return 0.5 <= theil_sen(x, level) / theil_sen(finished, longer) <= 2.0


def _owned_fill(points: tuple[Window, ...], x: Floats, y: Floats, threshold: float) -> Fill | None:
    """The fall is a fill if once the growth of capped owners is taken out no growth is left, or under a fifth of it."""
    held: dict[str, int] = {owner.owner: -owner.held for owner in points[0].capped}
    for owner in points[-1].capped:
        held[owner.owner] = held.get(owner.owner, 0) + owner.held
    if not any(gain > threshold / 2 for gain in held.values()):
        return None
    rest = y + np.array([sum(owner.held for owner in point.capped) for point in points], dtype=np.float64)
    beside, _ = without_steps(rest, threshold, FALLS - 1)
    grows = falls_since_rise(rest, threshold)[0] >= FALLS or _declines(x, beside, threshold)
    if grows and theil_sen(x, rest) < 0.2 * theil_sen(x, y):
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
