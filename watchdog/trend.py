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
from watchdog.robust import agreement, theil_sen
from watchdog.shape import FALLS, Fill, Shape, own_or_free, owned_fill, shape_of, shaped_fill

REQUESTS = 64
FEWEST = FALLS + 1
"""Windows without which nothing is said."""
CONFIDENT = 0.5
"""Below it the forecast is withheld."""
SIGMAS = 5.0
"""A change of level counts from so many standard deviations of one window's floor."""


class TrendClass(StrEnum):
    FLAT = "flat"
    FIRST_USE = "first_use"
    GROWTH = "growth"
    FILL = "fill"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


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
    if len(looked_at) < FEWEST:
        return Trend(trend.ready, points)
    every, known = own_or_free(points)
    shape = shape_of(points, every, looked_at)
    if shape.grows:
        return _growing(trend.ready, points, shape)
    if not shape.falls:
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
    if len(points) < FEWEST:
        return None
    y, _ = own_or_free(points)
    finished = np.array([point.finished for point in points], dtype=np.float64)
    tokens = np.array([point.prompt_tokens for point in points], dtype=np.float64)
    at = np.array([point.at for point in points], dtype=np.float64)
    per_request, per_second = trend.bytes_per_request, trend.bytes_per_second
    return Slopes(
        per_request=-theil_sen(finished, y) if per_request is None else per_request,
        per_1k_tokens=-1000.0 * theil_sen(tokens, y),
        per_second=-theil_sen(at, y) if per_second is None else per_second,
    )


def _growing(ready: Window, points: tuple[Window, ...], shape: Shape) -> Trend:
    """Growth or fill, with its slopes and how far they can be trusted."""
    x, level = shape.x, shape.level
    at = np.array([window.at for window in shape.windows], dtype=np.float64)
    slope, per_second = -theil_sen(x, level), -theil_sen(at, level)
    if slope <= 0.0:  # most pairs lie on plateaus
        slope = max(0.0, float(level[0] - level[-1]) / max(1.0, float(x[-1] - x[0])))
    if per_second <= 0.0:
        per_second = slope * float(x[-1] - x[0]) / max(1e-9, float(at[-1] - at[0]))
    fill = owned_fill(shape) or shaped_fill(shape)
    kind = TrendClass.GROWTH if fill is None else TrendClass.FILL
    return Trend(ready, points, kind, slope, per_second, agreement(x, level, -slope), fill)


def _finished(point: Window) -> int:
    return point.finished
