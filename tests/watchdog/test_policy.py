"""What surrounds the table: confirmation, one act at a time, budget, degraded, blind, dry-run. Figures are MiB."""

import pytest

from tests.watchdog.policy_bench import (
    FLOORS,
    FOREIGN,
    GROWTH,
    OK,
    RELOAD,
    TRIM,
    TRIMS,
    WARN,
    Bench,
    near,
)
from watchdog.actions import Outcome, Regrow, Rung, Trim
from watchdog.config import WatchdogConfig
from watchdog.floors import Level, floors_of
from watchdog.policy import decide, rearm, reload_begun, reload_done, start, told
from watchdog.snapshot import GIB, MIB, Elastic, Holdings
from watchdog.state import Decision, EnginePhase, State, View

# confirmation and hysteresis


def test_two_low_samples_are_not_enough_and_the_count_begins_anew() -> None:
    bench = Bench()
    bench.run(2, RELOAD)
    bench.run(1, OK)
    bench.run(2, RELOAD)
    assert bench.actions == []
    bench.run(1, RELOAD)
    assert bench.rungs == [Rung.POOLS]


def test_the_least_of_three_samples_is_confirmed() -> None:
    bench = Bench()
    for idle in (RELOAD, WARN, TRIM):
        bench.sample(idle)
    assert bench.state.devices[0].level is Level.WARN


def test_a_level_is_left_only_well_above_the_next_floor() -> None:
    bench = Bench()
    bench.run(3, TRIM)
    bench.run(1, 330)
    assert bench.state.devices[0].level is Level.TRIM, "337 MiB is warn plus 10 %"
    bench.run(1, 338)
    assert bench.state.devices[0].level is Level.OK


# one at a time, cool-down, budget, gain


def test_one_rung_per_decision_and_a_fresh_sample_between() -> None:
    bench = Bench()
    bench.run(2, TRIM)
    first = bench.sample(TRIM, tell=False)
    assert isinstance(first.action, Trim)
    assert bench.run(5, TRIM)[-1].action is None, "still in flight"
    bench.state = told(bench.state, Outcome(first.action, bench.at + 1.0, "noop"), bench.holdings())
    assert bench.sample(TRIM).action is None, "this sample is not later than the outcome"
    assert bench.sample(TRIM).action is not None


def test_the_climb_ends_when_the_level_is_left() -> None:
    bench = Bench()
    bench.returns = {Rung.POOLS: 200 * MIB}
    bench.run(20, TRIM)
    assert bench.rungs == [Rung.POOLS]


def test_ladders_are_a_cooldown_apart_and_empty_rungs_are_skipped_after_two() -> None:
    bench = Bench()
    bench.run(10, TRIM)
    assert len(bench.rungs) == 4
    bench.run(50, TRIM)
    assert len(bench.rungs) == 4
    bench.run(600, TRIM)
    assert bench.rungs == [*TRIMS, *TRIMS]
    bench.generation = 2
    bench.run(10, TRIM)
    assert len(bench.rungs) == 12, "another engine"


def test_two_automatic_reloads_an_hour() -> None:
    bench = Bench()
    for _ in range(2):
        bench.run(3, RELOAD, GROWTH)
        bench.state = reload_done(bench.state, bench.at, (4 * GIB,))
    decisions = bench.run(10, RELOAD, GROWTH)
    assert len(bench.reloads) == 2
    assert decisions[-1].state is State.DEGRADED
    assert "budget" in decisions[-1].reason
    bench.at += 3600.0
    bench.run(5, RELOAD, GROWTH)
    assert len(bench.reloads) == 3, "an hour later"


def test_a_reload_of_the_operator_costs_no_budget() -> None:
    bench = Bench()
    for _ in range(3):
        bench.state = reload_begun(bench.state, bench.at)
        assert bench.sample(OK).state is State.RELOAD
        bench.state = reload_done(bench.state, bench.at, (4 * GIB,))
    bench.run(3, RELOAD, GROWTH)
    assert len(bench.reloads) == 1


@pytest.mark.parametrize(("ready", "word"), [(None, "failed"), ((110 * MIB,), "10 MiB")])
def test_a_reload_that_failed_or_brought_nothing_is_not_repeated(ready: tuple[int, ...] | None, word: str) -> None:
    bench = Bench()
    bench.run(3, RELOAD, GROWTH)
    bench.state = reload_done(bench.state, bench.at, ready)
    decisions = bench.run(50, RELOAD, GROWTH)
    assert len(bench.reloads) == 1
    assert decisions[-1].state is State.DEGRADED
    assert word in decisions[-1].reason


def degraded(idle: int = RELOAD) -> Bench:
    bench = Bench(config=WatchdogConfig(reload_per_hour=0))
    assert bench.run(5, idle, GROWTH)[-1].state is State.DEGRADED
    return bench


def test_degraded_rearms_when_idle_free_rises_by_a_tenth_of_e() -> None:
    bench = degraded()
    barred = bench.state.devices[0].degraded
    bench.config = WatchdogConfig()
    bench.run(5, RELOAD + 51, GROWTH)
    assert bench.state.devices[0].degraded == barred
    assert bench.reloads == [], "barred, although there is a budget again"
    bench.run(1, RELOAD + 52, GROWTH)
    assert len(bench.reloads) == 1


def test_or_after_an_hour_or_by_the_operator() -> None:
    bench = degraded()
    since = bench.state.devices[0].degraded
    bench.at += 3600.0
    bench.run(1, RELOAD, GROWTH)
    assert bench.state.devices[0].degraded != since
    assert rearm(degraded().state, 0).devices[0].degraded is None


def test_requests_are_held_only_while_degraded_and_out_of_raw_memory() -> None:
    bench = degraded()
    assert not bench.sample(RELOAD, GROWTH, free=32).hold
    assert bench.sample(RELOAD, GROWTH, free=31).hold
    assert not bench.sample(RELOAD, GROWTH, free=100).hold
    assert not Bench().run(5, OK, free=0)[-1].hold


def test_the_largest_late_allocation_counts_for_holding() -> None:
    bench = Bench(floors_of(4 * GIB, 512 * MIB, largest_late=90 * MIB), config=WatchdogConfig(reload_per_hour=0))
    bench.run(5, RELOAD, GROWTH)
    assert bench.sample(RELOAD, GROWTH, free=89).hold


# raw memory, blind, tight, modes, phases


def test_raw_memory_only_warns() -> None:
    bench = Bench(elastic=Elastic(GIB, GIB))
    decisions = bench.run(100, OK, free=10)
    assert bench.actions == []
    assert decisions[-1].state is State.WATCH
    assert decisions[-1].action is None


def test_a_blind_device_is_never_acted_on_and_counts_nothing() -> None:
    bench = Bench()
    bench.run(2, RELOAD, GROWTH)
    decisions = bench.run(10, RELOAD, GROWTH, blind=True)
    assert {decision.state for decision in decisions} == {State.BLIND}
    bench.run(2, RELOAD, GROWTH)
    assert bench.actions == [], "three samples, but none before the loss of sight counts"
    bench.run(1, RELOAD, GROWTH)
    assert len(bench.reloads) == 1


def test_a_set_reload_does_not_survive_blindness() -> None:
    bench = Bench()
    bench.run(8, TRIM, GROWTH)
    bench.run(1, TRIM, GROWTH, blind=True)
    assert bench.state.devices[0].due is None


def test_a_tight_device_is_not_judged_by_level_but_by_its_trend() -> None:
    bench = Bench(floors_of(90 * MIB, 512 * MIB))
    assert bench.floors.tight
    bench.run(50, 40)
    assert bench.actions == []
    bench.run(70, 40, GROWTH, forecast=near(0.0, 0.0))
    assert bench.rungs == [Rung.POOLS], "no time is left for more"
    assert len(bench.reloads) == 1


def test_off_is_disabled() -> None:
    bench = Bench(config=WatchdogConfig(mode="off"))
    assert {decision.state for decision in bench.run(10, RELOAD, GROWTH)} == {State.DISABLED}
    assert bench.actions == []


def test_dry_run_names_every_rung_and_the_reload_and_changes_nothing() -> None:
    bench = Bench(config=WatchdogConfig(mode="dry-run"))
    decisions = bench.run(300, TRIM, GROWTH, free=5)
    assert bench.rungs[:4] == TRIMS
    assert len(bench.reloads) >= 2, "the budget is not touched"
    assert all(decision.dry_run and not decision.hold for decision in decisions)
    assert {decision.state for decision in decisions} <= {State.OK, State.WATCH}
    device = bench.state.devices[0]
    assert (device.degraded, device.in_flight, device.ladder.empties) == (None, None, ())
    assert (bench.state.reloads, bench.state.reloading) == ((), None)


@pytest.mark.parametrize(("engine", "state"), [("loading", State.RELOAD), ("stuck", State.STUCK)])
def test_nothing_is_decided_while_no_engine_serves(engine: EnginePhase, state: State) -> None:
    bench = Bench()
    assert {decision.state for decision in bench.run(10, RELOAD, GROWTH, engine=engine)} == {state}
    assert bench.actions == []


def test_regrow_when_room_has_come_back() -> None:
    floors = floors_of(512 * MIB, 512 * MIB)
    bench = Bench(floors, elastic=Elastic(plan=GIB, held=GIB - 300 * MIB))
    bench.at = 100.0
    bench.run(2, 512 + 200)
    assert bench.actions == []
    bench.run(1, 512 + 200)
    assert bench.actions == [Regrow(0, 200 * MIB)]
    bench.run(30, 512 + 200)
    assert len(bench.actions) == 1, "cools down"


def test_no_regrowth_into_a_leak() -> None:
    bench = Bench(floors_of(512 * MIB, 512 * MIB), elastic=Elastic(plan=GIB, held=GIB // 2))
    bench.at = 100.0
    bench.run(20, 512 + 200, GROWTH)
    assert bench.actions == []


def test_one_reload_for_both_devices() -> None:
    state = start(2)
    config = WatchdogConfig()
    begun: list[Decision] = []
    for second in range(10):
        for device in (0, 1):
            view = View(float(second), device, FLOORS, Holdings(1), 100 * MIB, 100 * MIB, GROWTH, foreign=0)
            state, decision = decide(state, view, config)
            if decision.action is not None:
                begun.append(decision)
    assert len(begun) == 1
    assert len(state.reloads) == 1


def test_a_reload_that_would_bring_nothing_back_is_barred() -> None:
    bench = Bench()
    decisions = bench.run(10, RELOAD, GROWTH, foreign=3990)
    assert bench.reloads == []
    assert decisions[-1].state is State.DEGRADED
    assert "6 MiB" in decisions[-1].reason, "4,096 less 3,990 less 100"


def test_a_neighbour_calls_a_set_reload_off_under_trim_too() -> None:
    bench = Bench()
    assert bench.run(8, TRIM, GROWTH)[-1].due is not None
    assert bench.run(1, TRIM, FOREIGN, foreign=3800)[-1].due is None
    bench.run(100, TRIM, FOREIGN, foreign=3800)
    assert bench.reloads == []
