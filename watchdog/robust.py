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
    if n < 40:  # below that Python's sort is faster than a call of NumPy
        few = sorted(values.tolist())
        return float(few[middle]) if n % 2 else float(few[middle - 1] + few[middle]) / 2.0
    if n % 2:
        part = values.copy()
        part.partition(middle)
        return float(part[middle])
    part = values.copy()
    part.partition((middle - 1, middle))
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
    """Standard deviation of a single value, from neighbouring differences; neither slope nor steps count.

    Two estimates, each too large in its own case: the spread around the median difference (when the series falls in
    bursts), and the mean rise (when it rose once by a lot). The smaller one stands.
    """
    if len(y) < 3:
        return 0.0
    d = y[1:] - y[:-1]
    spread = 1.4826 * median(np.abs(d - median(d))) / math.sqrt(2.0)
    rises = float(d[d > 0.0].sum()) / len(d) * math.sqrt(math.pi)  # E[max(d, 0)] = sigma / sqrt(pi) for d of two draws
    return min(spread, rises)


def falls_since_rise(y: Floats, threshold: float) -> list[float]:
    """Heights of the separate falls since the last rise: values `threshold` off the mean of their plateau.

    A plateau is all that lies between two changes of level. Its mean keeps single noisy values from being falls.
    """
    values = y.tolist()
    total, count = values[0], 1
    falls: list[float] = []
    for value in values:
        change = value - total / count
        if -threshold < change < threshold:
            total += value
            count += 1
            continue
        if change < 0.0:
            falls.append(-change)
        else:
            falls.clear()
        total, count = value, 1
    return falls


def alike(heights: list[float], most: float) -> int:
    """How many of `heights` lie within a factor `most` of one another."""
    ordered = sorted(heights)
    best = first = 0
    for last, height in enumerate(ordered):
        while ordered[first] * most < height:
            first += 1
        best = max(best, last - first + 1)
    return best


def without_steps(y: Floats, threshold: float, most: int) -> tuple[Floats, int]:
    """`y` with at most `most` abrupt and lasting falls taken out, and how many were.

    A fall lasts if the next three values stay down. One among many like it is no step but the trend itself: it must
    be 2.5 times the largest of those left in. What remains shows whether there is a trend beside the steps.
    """
    steps = sorted(_steps(y, threshold))
    least = 2.5 * steps[most][0] if len(steps) > most else 0.0
    level, taken = y.copy(), 0
    for height, k in steps[:most]:
        if height <= least:
            level[k:] -= height
            taken += 1
    return level, taken


def _steps(y: Floats, threshold: float) -> list[tuple[float, int]]:
    """(height below 0, index of the first value after it) of each step; it takes one or two values, more is a slope."""
    d = y[1:] - y[:-1]
    if d.min() > -threshold:
        return []
    steep = (np.flatnonzero(d <= -max(threshold, 4.0 * median(np.abs(d)))) + 1).tolist()
    steps: list[tuple[float, int]] = []
    k = 0
    while k < len(steep):
        first = last = steep[k]
        while k + 1 < len(steep) and steep[k + 1] == last + 1:
            k += 1
            last = steep[k]
        lasting = median(y[last : last + 3]) - median(y[max(0, first - 3) : first])
        if last - first < 2 and lasting <= -threshold:
            steps.append((float(y[last] - y[first - 1]), last))
        k += 1
    return steps


def agreement(x: Floats, y: Floats, slope: float) -> float:
    """Share of the slopes over half the points that have the sign of `slope` and are within a factor of 2 of it."""
    lag = max(1, len(x) // 2)
    dx = x[lag:] - x[:-lag]
    apart = dx > 0.0
    if slope == 0.0 or not apart.any():
        return 0.0
    ratio = (y[lag:] - y[:-lag])[apart] / (dx[apart] * slope)
    return float(((ratio >= 0.5) & (ratio <= 2.0)).mean())
