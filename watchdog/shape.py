"""The shape of a fall: steady or in steps, towards a cap or without end. The judgements under trend.py."""

from dataclasses import dataclass

import numpy as np

from watchdog.idle_floor import Window
from watchdog.robust import Floats, alike, falls_since_rise, mann_kendall, median, noise, theil_sen, without_steps
from watchdog.snapshot import GRANULE, MIB

FALLS = 3
"""Separate falls without a rise between them are growth, whatever the slope says; up to two are steps."""
ALIKE = 6.0
"""And they are one cause's falls, within this factor: two steps and a busy window are not three of a kind."""
SIGMAS = 5.0
"""A change of level counts from so many standard deviations of one window's floor."""


@dataclass(frozen=True, slots=True)
class Fill:
    """What rises towards a cap: a named owner, or None when only the shape of the fall says so."""

    owner: str | None
    remaining: float


@dataclass(frozen=True, slots=True)
class Shape:
    """The series of the windows looked at. `level` is `y` without the steps that stand apart from the rest."""

    windows: tuple[Window, ...]
    x: Floats
    y: Floats
    level: Floats
    threshold: float
    falls: list[float]
    steady: bool
    """What is left without the steps still falls."""

    @property
    def grows(self) -> bool:
        return self.steady or alike(self.falls, ALIKE) >= FALLS


def own_or_free(points: tuple[Window, ...]) -> tuple[Floats, bool]:
    """(the series to judge, whether it is own bytes): own bytes mirrored if all are known, else idle free memory."""
    own = [point.own for point in points]
    if None not in own:
        return -np.array(own, dtype=np.float64), True
    return np.array([point.free for point in points], dtype=np.float64), False


def shape_of(points: tuple[Window, ...], every: Floats, looked_at: tuple[Window, ...]) -> Shape:
    """`every` is the series of all `points`: they tell the noise; `looked_at` are the last of them."""
    x = _finished(looked_at)
    y = every[-len(looked_at) :]
    threshold = max(float(GRANULE), SIGMAS * noise(every), _doubt(len(points)))
    level, steps = without_steps(y, threshold, FALLS - 1)
    steady = _declines(x, level, threshold) or _goes_on(points, x, every, level, threshold)
    if not steady and steps and len(falls_since_rise(level, threshold)) < FALLS - 1:
        level = y  # if there is growth, the steps are nearly all of it
    return Shape(looked_at, x, y, level, threshold, falls_since_rise(y, threshold), steady)


def owned_fill(shape: Shape) -> Fill | None:
    """The fall is a fill if once the growth of capped owners is taken out no growth is left, or under a fifth of it."""
    first, last, x, y = shape.windows[0], shape.windows[-1], shape.x, shape.y
    gains = {owner.owner: -owner.held for owner in first.capped}
    for owner in last.capped:
        gains[owner.owner] = gains.get(owner.owner, 0) + owner.held
    if not any(gain > shape.threshold / 2 for gain in gains.values()):
        return None
    held = [sum(owner.held for owner in window.capped) for window in shape.windows]
    rest = y + np.array(held, dtype=np.float64)
    beside, _ = without_steps(rest, shape.threshold, FALLS - 1)
    if alike(falls_since_rise(rest, shape.threshold), ALIKE) >= FALLS:
        beside = rest
    elif not _declines(x, beside, shape.threshold):
        beside = np.zeros_like(rest)
    if theil_sen(x, beside) < 0.2 * theil_sen(x, y):
        return None
    remaining = sum(owner.cap - owner.held for owner in last.capped if gains[owner.owner] > 0)
    return Fill(max(gains, key=lambda owner: gains[owner]), float(remaining))


def shaped_fill(shape: Shape) -> Fill | None:
    """A steady fall whose later half is much smaller than its earlier one approaches a cap, as 1 - exp does."""
    level, n = shape.level, len(shape.level)
    if n < 9 or (level is shape.y and not shape.steady):
        return None
    few = max(1, n // 8)
    middle = median(level[n // 2 - few // 2 : n // 2 + (few + 1) // 2])
    earlier, later = median(level[:few]) - middle, middle - median(level[-few:])
    if earlier < 2.0 * shape.threshold or later > 0.4 * earlier:
        return None
    ratio = max(0.0, later) / earlier
    return Fill(None, 1.5 * max(0.0, later) * ratio / (1.0 - ratio) + shape.threshold)


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
    finished = _finished(points)
    if not _declines(finished, longer, threshold):
        return False
    return 0.5 <= theil_sen(x, level) / theil_sen(finished, longer) <= 2.0


def _finished(points: tuple[Window, ...]) -> Floats:
    return np.array([point.finished for point in points], dtype=np.float64)
