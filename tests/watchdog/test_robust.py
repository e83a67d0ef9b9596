"""Each statistic against a slow, obvious twin, and against the wild values that it must survive."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchdog.robust import agreement, alike, falls_since_rise, mann_kendall, median, noise, theil_sen, without_steps

SERIES = st.lists(st.integers(-1000, 1000).map(float), min_size=2, max_size=40)


@given(SERIES)
def test_median(values: list[float]) -> None:
    assert median(np.array(values)) == statistics.median(values)


@given(SERIES, st.randoms(use_true_random=False))
def test_theil_sen_is_the_median_of_all_slopes(values: list[float], random: object) -> None:
    x = [float(k // 2) for k in range(len(values))]
    pairs = itertools.combinations(range(len(values)), 2)
    slopes = [(values[j] - values[i]) / (x[j] - x[i]) for i, j in pairs if x[i] != x[j]]
    expected = statistics.median(slopes) if slopes else 0.0
    assert theil_sen(np.array(x), np.array(values)) == pytest.approx(expected)


def test_theil_sen_survives_a_quarter_of_nonsense() -> None:
    x = np.arange(64.0)
    y = -4.0 * x
    y[::4] = 1e9
    assert theil_sen(x, y) == pytest.approx(-4.0, rel=0.2)


@given(SERIES)
def test_mann_kendall_counts_signs(values: list[float]) -> None:
    n = len(values)
    s = sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))
    z = mann_kendall(np.array(values))
    assert (z > 0) == (s > 1 and n >= 3)
    assert (z < 0) == (s < -1 and n >= 3)


def test_mann_kendall_is_about_normal_on_noise() -> None:
    random = np.random.default_rng(7)
    scores = [mann_kendall(random.normal(size=64)) for _ in range(400)]
    assert statistics.fmean(scores) == pytest.approx(0.0, abs=0.2)
    assert statistics.stdev(scores) == pytest.approx(1.0, abs=0.15)


def test_noise_does_not_see_slope_or_steps() -> None:
    random = np.random.default_rng(7)
    y = random.normal(0.0, 5.0, 400) - 0.5 * np.arange(400)
    y[100:] -= 500.0
    y[200:] += 900.0
    assert noise(y) == pytest.approx(5.0, rel=0.25)


def test_falls_are_separate_and_end_with_a_rise() -> None:
    assert falls_since_rise(np.array([100.0, 96, 97, 92, 93, 87]), 4.0) == pytest.approx([4, 4.5, 5.5])
    assert falls_since_rise(np.array([100.0, 96, 92, 99, 95]), 4.0) == [4]
    assert falls_since_rise(np.array([100.0, 99, 98, 97, 96, 95, 94, 93, 92]), 4.0) == [4.375], "slow falls add up"
    assert falls_since_rise(np.array([103.0, 97, 103, 97, 99, 96]), 7.0) == [], "noise about a level"


def test_alike() -> None:
    assert alike([], 6.0) == 0
    assert alike([300.0, 2000.0, 2.0], 6.0) == 1
    assert alike([60.0, 6.0, 4.0, 2.0], 6.0) == 3
    assert alike([60.0, 6.0, 4.0, 2.0], 10.0) == 3
    assert alike([10.0, 20.0, 30.0, 40.0, 50.0], 6.0) == 5


def test_steps_come_out_and_a_trend_beside_them_stays() -> None:
    y = -2.0 * np.arange(20)
    y[5:] -= 60.0
    level, steps = without_steps(y, 20.0, most=2)
    assert steps == 1
    assert theil_sen(np.arange(20.0), level) == pytest.approx(-2.0)
    dip = np.zeros(20)
    dip[7] = -60.0
    assert without_steps(dip, 20.0, most=2)[1] == 0, "it did not last"
    gradual = np.array([100.0] * 5 + [70.0] + [40.0] * 6)
    level, steps = without_steps(gradual, 20.0, most=2)
    assert steps == 1
    assert level[-1] == 100.0, "one step over two windows is taken out once"


def test_agreement_is_the_share_of_like_slopes() -> None:
    x = np.arange(20.0)
    assert agreement(x, -3.0 * x, -3.0) == 1.0
    assert agreement(x, -3.0 * x, 3.0) == 0.0
    assert agreement(x, -3.0 * x, -7.0) == 0.0
    assert agreement(x, -3.0 * x, 0.0) == 0.0
