"""The table, row by row and column by column. Figures are MiB."""

import pytest

from tests.watchdog.policy_bench import (
    FILL,
    FIRST_USE,
    FLAT,
    FOREIGN,
    GROWTH,
    OK,
    RELOAD,
    TRIM,
    TRIMS,
    UNKNOWN,
    WARN,
    Bench,
    near,
)
from watchdog.actions import Cap, Reload, ReloadReason, Rung, Trim
from watchdog.config import WatchdogConfig
from watchdog.policy import reload_done
from watchdog.snapshot import GIB, MIB, Elastic
from watchdog.state import State
from watchdog.trend import TrendClass

# flat and first use


@pytest.mark.parametrize("kind", [FLAT, FIRST_USE, GROWTH, FILL, FOREIGN, UNKNOWN])
def test_above_warn_nothing_is_done(kind: TrendClass) -> None:
    bench = Bench(elastic=Elastic(GIB, GIB))
    decisions = bench.run(10, OK, kind)
    assert bench.actions == []
    assert decisions[-1].state is (State.WATCH if kind is GROWTH else State.OK)


@pytest.mark.parametrize("kind", [FLAT, FIRST_USE])
def test_flat_under_warn_takes_the_idle_rungs_once(kind: TrendClass) -> None:
    bench = Bench()
    decisions = bench.run(5, WARN, kind)
    assert bench.actions == [], "something runs"
    assert decisions[-1].state is State.WATCH
    bench.run(200, WARN, kind, idle_for=1.0)
    assert bench.rungs == [Rung.POOLS, Rung.STACK_LIMIT, Rung.CUBLAS_WORKSPACE]


def test_flat_under_trim_climbs_without_reload() -> None:
    bench = Bench(elastic=Elastic(GIB, GIB, 0))
    decisions = bench.run(3, TRIM)
    assert decisions[-1].state is State.TRIM
    bench.run(4, TRIM)
    assert bench.rungs == [*TRIMS, Rung.ELASTIC]
    shrunk = bench.actions[-1]
    assert isinstance(shrunk, Trim)
    assert shrunk.wanted == 138 * MIB, "up to where the level is left: 338 MiB in whole granules"
    bench.run(300, TRIM)
    assert bench.reloads == []


def test_flat_under_reload_climbs_and_then_reloads_if_that_helps() -> None:
    bench = Bench()
    bench.run(7, RELOAD)
    assert bench.rungs == TRIMS
    assert bench.reloads == [Reload(0, ReloadReason.FLOOR)]


def test_flat_under_reload_is_degraded_if_a_reload_would_not_help() -> None:
    bench = Bench()
    decisions = bench.run(20, RELOAD, foreign=3900)
    assert bench.reloads == []
    assert decisions[-1].state is State.DEGRADED
    assert "under the warn floor" in decisions[-1].reason


# growth


def test_growth_above_warn_notes_the_forecast() -> None:
    decision = Bench().run(5, OK, GROWTH, forecast=near(7200.0, 120))[-1]
    assert decision.state is State.WATCH
    assert "120 requests" in decision.reason


def test_growth_under_warn_climbs_and_sets_no_reload() -> None:
    bench = Bench()
    decisions = bench.run(100, WARN, GROWTH)
    assert bench.rungs[:4] == TRIMS
    assert all(decision.due is None for decision in decisions)


def test_growth_under_trim_without_elastic_room_reloads_within_a_minute() -> None:
    bench = Bench()
    decisions = bench.run(8, TRIM, GROWTH)
    assert decisions[-1].state is State.DRAIN
    assert decisions[-1].due is not None
    assert bench.reloads == []
    bench.run(54, TRIM, GROWTH)
    assert bench.reloads == [], "set by the third sample"
    bench.run(1, TRIM, GROWTH)
    assert bench.reloads == [Reload(0, ReloadReason.GROWTH)]


def test_or_at_the_next_idle_moment() -> None:
    bench = Bench()
    bench.run(8, TRIM, GROWTH, idle_for=2.0)
    assert bench.reloads == [], "the gap between two requests"
    bench.run(1, TRIM, GROWTH, idle_for=5.0)
    assert len(bench.reloads) == 1


def test_growth_under_trim_is_bridged_by_elastic_memory() -> None:
    bench = Bench(elastic=Elastic(plan=64 * GIB, held=64 * GIB, minimum=GIB))
    decisions = bench.run(7, TRIM, GROWTH, bps=1.0 * MIB)
    shrunk = bench.actions[-1]
    assert isinstance(shrunk, Trim)
    assert shrunk.rung is Rung.ELASTIC
    assert shrunk.wanted == (600 - (TRIM - 128)) * MIB, "what the next ten minutes need"
    assert decisions[-1].due is not None
    assert decisions[-1].due.deadline is None
    bench.run(120, OK, GROWTH, bps=1.0 * MIB)
    assert bench.reloads == [], "bridged"
    bench.run(1, OK, GROWTH, bps=1.0 * MIB, idle_for=6.0)
    assert len(bench.reloads) == 1, "the next idle moment"


def test_when_half_of_the_elastic_memory_is_gone_the_reload_waits_no_longer_than_a_minute() -> None:
    bench = Bench(elastic=Elastic(plan=GIB, held=GIB // 2, minimum=0))
    bench.run(70, TRIM, GROWTH, bps=1.0 * MIB)
    assert Rung.ELASTIC not in bench.rungs
    assert len(bench.reloads) == 1


def test_growth_under_reload_reloads_at_once() -> None:
    bench = Bench()
    bench.run(3, RELOAD, GROWTH)
    assert bench.actions == [Reload(0, ReloadReason.FLOOR)]


def test_a_forecast_inside_the_horizon_acts_as_if_under_trim() -> None:
    bench = Bench()
    bench.run(8, OK, GROWTH, forecast=near(1700.0), bps=0.1 * MIB)
    assert bench.rungs == TRIMS
    assert bench.last is not None
    assert bench.last.state is State.DRAIN
    assert bench.last.due is not None
    assert bench.last.due.reason is ReloadReason.FORECAST


def test_a_forecast_beyond_the_horizon_does_not() -> None:
    bench = Bench()
    bench.run(20, OK, GROWTH, forecast=near(1900.0))
    assert bench.actions == []


def test_a_forecast_alone_waits_until_a_reload_is_worth_it() -> None:
    bench = Bench()
    decisions = bench.run(100, 3500, GROWTH, forecast=near(1700.0, 400))
    assert bench.rungs[:4] == TRIMS
    assert bench.reloads == []
    assert "too little" in decisions[-1].reason
    assert decisions[-1].state is State.WATCH


def test_a_reload_is_called_off_when_its_need_has_passed() -> None:
    bench = Bench()
    bench.run(8, TRIM, GROWTH)
    decisions = bench.run(3, OK, FLAT)
    assert "called off" in decisions[0].reason
    bench.run(100, OK, FLAT)
    assert bench.reloads == []


# fill, foreign, unknown


def test_a_fill_under_warn_is_capped_once() -> None:
    bench = Bench()
    bench.run(50, WARN, FILL, owner="pool_cached")
    assert bench.actions == [Cap(0, "pool_cached")]


def test_a_fill_under_trim_is_treated_as_growth() -> None:
    bench = Bench()
    bench.run(70, TRIM, FILL, owner="pool_cached")
    assert bench.rungs == TRIMS
    assert len(bench.reloads) == 1


def test_foreign_memory_is_warned_about_then_shrunk_for_and_never_reloaded_for() -> None:
    bench = Bench(elastic=Elastic(GIB, GIB, 900 * MIB))
    assert bench.run(5, WARN, FOREIGN, foreign=700)[-1].state is State.WATCH
    assert bench.actions == []
    bench.run(5, TRIM, FOREIGN, foreign=780)
    assert bench.rungs == [Rung.ELASTIC]
    decisions = bench.run(200, RELOAD - 100, FOREIGN, foreign=900)
    assert set(bench.rungs) == {Rung.ELASTIC}
    assert bench.reloads == []
    assert decisions[-1].state is State.DEGRADED


def test_foreign_memory_is_shrunk_for_as_long_as_it_takes_what_is_given_up() -> None:
    """A neighbour that wants 600 MiB takes them as they become free: 60 s a piece would be too slow for it and us."""
    bench = Bench(elastic=Elastic(2 * GIB, 2 * GIB))
    bench.run(4, OK, FOREIGN)
    for _ in range(20):
        taken = min(600 * MIB, bench.released + 150 * MIB)
        bench.sample(TRIM - taken // MIB + 150, FOREIGN, free=OK, foreign=780)
    assert 550 * MIB <= bench.released <= 620 * MIB, "what it took, and no more"
    assert bench.last is not None
    assert bench.last.state is State.OK
    assert bench.reloads == []


def test_a_dry_run_does_not_name_the_shrink_at_every_sample() -> None:
    bench = Bench(elastic=Elastic(2 * GIB, 2 * GIB), config=WatchdogConfig(mode="dry-run"))
    bench.run(120, TRIM, FOREIGN, foreign=780)
    assert bench.rungs == [Rung.ELASTIC, Rung.ELASTIC]


def test_an_unknown_loss_gets_one_reload() -> None:
    bench = Bench()
    bench.run(10, TRIM, UNKNOWN, foreign=None)
    assert bench.rungs == TRIMS
    assert bench.reloads == []
    bench.run(70, RELOAD, UNKNOWN, foreign=None)
    assert len(bench.reloads) == 1
    bench.state = reload_done(bench.state, bench.at, (4 * GIB,))
    decisions = bench.run(200, RELOAD, UNKNOWN, foreign=None)
    assert len(bench.reloads) == 1
    assert decisions[-1].state is State.DEGRADED
