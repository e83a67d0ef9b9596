"""The six classes, on series a person can read, and the forecast."""

from collections.abc import Sequence

import numpy as np
import pytest

from watchdog.idle_floor import Window
from watchdog.snapshot import MIB, CappedOwner
from watchdog.trend import Trend, TrendClass, begin, extend, forecast, foreign_bytes, slopes

TOTAL = 16 * 1024


def play(
    free: Sequence[float],
    *,
    known: bool = True,
    foreign: Sequence[float] | None = None,
    capped: Sequence[tuple[int, int]] | None = None,
    per_window: int = 1,
) -> list[Trend]:
    """The trend after each value of `free` (MiB), a window each, 90 s and 1,000 prompt tokens a request."""
    trends: list[Trend] = []
    for k, value in enumerate(free):
        other = 0.0 if foreign is None else foreign[k]
        own = int((TOTAL - value - other) * MIB) if known else None
        owners = () if capped is None else (CappedOwner("pool_cached", capped[k][0] * MIB, capped[k][1] * MIB),)
        n = k * per_window
        window = Window(90.0 * n, n, 1000 * n, int(value * MIB), own, owners)
        trends.append(begin(window) if not trends else extend(trends[-1], window))
    return trends


def falling(start: float, steps: Sequence[float], count: int) -> list[float]:
    values = [start]
    for k in range(count):
        values.append(values[-1] - steps[k % len(steps)])
    return values


def test_flat() -> None:
    assert {trend.kind for trend in play([300.0] * 80)} == {TrendClass.FLAT}
    assert {trend.kind for trend in play([300.0, 298.0] * 40)} <= {TrendClass.FLAT, TrendClass.FIRST_USE}


@pytest.mark.parametrize("sigma", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("known", [True, False])
def test_noise_is_never_growth(sigma: float, known: bool) -> None:
    random = np.random.default_rng(11)
    for _ in range(10):
        for trend in play((500 + random.normal(0, sigma, 80)).tolist(), known=known):
            assert trend.kind is not TrendClass.GROWTH
            assert forecast(trend, 100 * MIB) is None


def test_a_step_then_flat_is_first_use_and_is_forgotten() -> None:
    trends = play([330.0] + [272.0] * 80)
    assert trends[0].kind is TrendClass.FLAT
    assert {trend.kind for trend in trends[3:60]} == {TrendClass.FIRST_USE}
    assert trends[-1].kind is TrendClass.FLAT
    assert forecast(trends[10], MIB) is None


def test_without_own_bytes_a_step_is_unknown_and_never_foreign() -> None:
    trends = play([900.0] * 10 + [100.0] * 10, known=False)
    assert trends[-1].kind is TrendClass.UNKNOWN
    assert foreign_bytes(trends[-1], 100 * MIB, None) is None


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("per_window", [1, 8])
def test_growth(known: bool, per_window: int) -> None:
    trends = play(falling(400.0, [4.0 * per_window], 12), known=known, per_window=per_window)
    assert trends[-1].kind is TrendClass.GROWTH
    assert trends[-1].bytes_per_request == pytest.approx(4 * MIB)
    assert trends[-1].bytes_per_second == pytest.approx(4 * MIB / 90)
    assert trends[-1].confidence == 1.0
    shown = slopes(trends[-1])
    assert shown is not None
    assert shown.per_1k_tokens == pytest.approx(4 * MIB)
    assert shown.per_request == trends[-1].bytes_per_request


def test_growth_in_noise_larger_than_its_slope() -> None:
    random = np.random.default_rng(5)
    series = 600 - 1.5 * np.arange(64) + random.normal(0, 8, 64)
    last = play(series.tolist())[-1]
    assert last.kind is TrendClass.GROWTH
    assert last.bytes_per_request == pytest.approx(1.5 * MIB, rel=0.25)


def test_growth_beside_a_step_has_the_slope_of_the_growth() -> None:
    series = [204.0, *falling(142.0, [6, 4, 4, 2, 4, 4, 2, 4, 2, 4, 2, 6], 24)]
    last = play(series)[-1]
    assert last.kind is TrendClass.GROWTH
    assert last.bytes_per_request == pytest.approx(44 / 12 * MIB, rel=0.15)


def test_three_separate_falls_are_growth_but_two_are_not() -> None:
    two = [500.0] * 10 + [450.0] * 10 + [420.0] * 10
    assert play(two)[-1].kind is TrendClass.FIRST_USE
    assert play([*two, *[380.0] * 5])[-1].kind is TrendClass.GROWTH
    assert play([*two, *[500.0] * 5, *[450.0] * 5])[-1].kind is TrendClass.FIRST_USE, "it rose in between"


def test_growth_is_over_when_it_stops() -> None:
    trends = play([*falling(600.0, [4.0], 30), *[480.0] * 70])
    assert trends[30].kind is TrendClass.GROWTH
    assert trends[-1].kind is TrendClass.FLAT


def test_a_named_owner_that_approaches_its_cap_is_a_fill() -> None:
    held = [min(6 * k, 240) for k in range(50)]
    last = play([800.0 - h for h in held[:30]], capped=[(h, 240) for h in held[:30]])[-1]
    assert last.kind is TrendClass.FILL
    assert last.fill is not None
    assert last.fill.owner == "pool_cached"
    assert last.fill.remaining == (240 - 29 * 6) * MIB
    assert forecast(last, 100 * MIB) is None, "it ends before"
    assert forecast(last, 30 * MIB) is not None, "it does not"


def test_a_leak_beside_a_fill_is_growth() -> None:
    held = [6 * k for k in range(30)]
    last = play([800.0 - h - 4 * k for k, h in enumerate(held)], capped=[(h, 1000) for h in held])[-1]
    assert last.kind is TrendClass.GROWTH


def test_a_fall_that_slows_down_is_a_fill_without_an_owner() -> None:
    series = [800.0 - 200.0 * (1.0 - float(np.exp(-k / 12.0))) for k in range(45)]
    last = play(series)[-1]
    assert last.kind is TrendClass.FILL
    assert last.fill is not None
    assert last.fill.owner is None
    assert forecast(last, 100 * MIB) is None


def test_a_neighbour_moves_nothing_where_own_bytes_are_known() -> None:
    foreign = [0.0] * 10 + [300.0] * 5 + [600.0] * 5 + [900.0] * 5
    trends = play([2000.0 - other for other in foreign], foreign=foreign)
    assert {trend.kind for trend in trends} == {TrendClass.FLAT}
    last = trends[-1].points[-1]
    assert foreign_bytes(trends[-1], last.free, last.own) == 900 * MIB


def test_growth_is_seen_beside_a_neighbour() -> None:
    foreign = [300.0 * (k % 7 < 3) for k in range(40)]
    trends = play([2000.0 - 5 * k - other for k, other in enumerate(foreign)], foreign=foreign)
    assert trends[-1].kind is TrendClass.GROWTH
    assert trends[-1].bytes_per_request == pytest.approx(5 * MIB)


def test_forecast_counts_elastic_bytes_and_requests_since() -> None:
    trend = play(falling(400.0, [4.0], 20))[-1]
    plain = forecast(trend, 40 * MIB)
    assert plain is not None
    assert plain.requests == pytest.approx(10)
    assert plain.seconds == pytest.approx(900)
    more = forecast(trend, 40 * MIB, elastic=400 * MIB)
    assert more is not None
    assert more.requests == pytest.approx(110)
    later = forecast(trend, 40 * MIB, requests_since=4)
    assert later is not None
    assert later.requests == pytest.approx(6)
    under = forecast(trend, -5 * MIB)
    assert under is not None
    assert under.requests == 0.0


def test_only_the_last_64_requests_count() -> None:
    trend = play([1000.0 - 8 * k for k in range(30)] + [760.0] * 66)[-1]
    assert trend.kind is TrendClass.FLAT
    assert len(trend.points) <= 65


def test_growth_too_slow_for_eight_windows_shows_over_more() -> None:
    """With 32 streams 64 requests are 8 windows; half a MiB a request is then lost in the noise of 8."""
    random = np.random.default_rng(3)
    series = (900 - 4.0 * np.arange(50) + random.normal(0, 8, 50)).tolist()
    trends = play(series, per_window=8)
    assert trends[9].kind is not TrendClass.GROWTH
    assert trends[-1].kind is TrendClass.GROWTH
    ended = play([*series, *[900 - 4.0 * 49 + noise for noise in random.normal(0, 8, 12)]], per_window=8)
    assert ended[-1].kind is not TrendClass.GROWTH, "it has stopped, whatever came before"
