"""Statistics that a few wild values do not move; the arithmetic under trend.py. Values are floats in bytes.

Free memory is a bad series for least squares: it steps, it dips when a whole window was busy, and a neighbour may come
or go. Medians of pairwise slopes (Theil 1950, Sen 1968), counts of signs (Mann 1945, Kendall 1975) and the median
absolute deviation survive that.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_PAIRS: dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]] = {}


def _pairs(n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices i < j of all pairs of n points; there are at most 65 sizes, so they are kept."""
    if n not in _PAIRS:
        _PAIRS[n] = np.triu_indices(n, 1)
    return _PAIRS[n]


def median(values: Floats) -> float:
    """Median without the generality (and the 20 µs) of numpy.median."""
    n = len(values)
    middle = n // 2
    if n % 2:
        return float(np.partition(values, middle)[middle])
    part = np.partition(values, (middle - 1, middle))
    return float(part[middle - 1] + part[middle]) / 2.0


def theil_sen(x: Floats, y: Floats) -> float:
    """Median slope over all pairs with different x; 0 if there is none."""
    i, j = _pairs(len(x))
    dx = x[j] - x[i]
    dy = y[j] - y[i]
    apart = dx != 0.0
    if not apart.all():
        dx, dy = dx[apart], dy[apart]
    return median(dy / dx) if len(dx) else 0.0


def mann_kendall(y: Floats) -> float:
    """Z score of the sign of all pairs: below 0 for a series that falls, about N(0, 1) for one that does not move."""
    n = len(y)
    if n < 3:
        return 0.0
    i, j = _pairs(n)
    s = float(np.sign(y[j] - y[i]).sum())
    if s == 0.0:
        return 0.0
    return (s - math.copysign(1.0, s)) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18.0)


def noise(y: Floats) -> float:
    """Standard deviation of a single value, from the spread of neighbouring differences (slope and steps drop out)."""
    if len(y) < 3:
        return 0.0
    d = np.diff(y)
    return 1.4826 * median(np.abs(d - median(d))) / math.sqrt(2.0)


def falls_since_rise(y: Floats, threshold: float) -> tuple[int, int]:
    """(separate falls since the last rise, index of that rise or 0); both are changes of level by `threshold`."""
    values = y.tolist()
    level = values[0]
    falls = since = 0
    for k, value in enumerate(values):
        if value <= level - threshold:
            falls += 1
            level = value
        elif value >= level + threshold:
            falls, since = 0, k
            level = value
    return falls, since


def without_steps(y: Floats, threshold: float, most: int) -> tuple[Floats, int]:
    """`y` with its `most` largest abrupt and lasting falls taken out, and how many were.

    A fall lasts if the next three values stay down. What is left shows whether there is a trend beside the steps.
    """
    found: list[tuple[float, int]] = []
    for k in (np.flatnonzero(np.diff(y) <= -threshold) + 1).tolist():
        before = median(y[max(0, k - 3) : k])
        height = median(y[k : k + 3]) - before
        if height <= -threshold:
            found.append((height, k))
    level = y.copy()
    taken: list[int] = []
    for height, k in sorted(found):
        if len(taken) < most and all(abs(k - other) > 2 for other in taken):  # neighbours are one step, seen twice
            level[k:] -= height
            taken.append(k)
    return level, len(taken)


def agreement(x: Floats, y: Floats, slope: float) -> float:
    """Share of the slopes over half the points that have the sign of `slope` and are within a factor of 2 of it."""
    lag = max(1, len(x) // 2)
    dx = x[lag:] - x[:-lag]
    apart = dx > 0.0
    if slope == 0.0 or not apart.any():
        return 0.0
    ratio = (y[lag:] - y[:-lag])[apart] / (dx[apart] * slope)
    return float(((ratio >= 0.5) & (ratio <= 2.0)).mean())
