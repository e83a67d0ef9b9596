"""The table row by row and column by column, and all that surrounds it. Views are made by hand, in MiB."""

from dataclasses import replace

import pytest

from watchdog.actions import Action, Cap, Outcome, Regrow, Reload, ReloadReason, Rung, Trim
from watchdog.config import WatchdogConfig
from watchdog.floors import Floors, Level, floors_of
from watchdog.policy import decide, rearm, reload_begun, reload_done, start, told
from watchdog.snapshot import GIB, MIB, Elastic, Holdings
from watchdog.state import Decision, EnginePhase, PolicyState, State, View
from watchdog.trend import Forecast, TrendClass

FLOORS = floors_of(4 * GIB, 512 * MIB)
"""warn 307, trim 230, reload 128 MiB; E = 512 MiB."""
OK, WARN, TRIM, RELOAD = 1000, 280, 200, 100
TRIMS = [Rung.POOLS, Rung.STACK_LIMIT, Rung.CUBLAS_WORKSPACE, Rung.GRAPH_CACHE]
GROWTH, FIRST_USE, FLAT = TrendClass.GROWTH, TrendClass.FIRST_USE, TrendClass.FLAT
FILL, FOREIGN, UNKNOWN = TrendClass.FILL, TrendClass.FOREIGN, TrendClass.UNKNOWN


class Bench:
    """One device, a sample a second; rungs return nothing unless `returns` says so."""

    def __init__(
        self, floors: Floors = FLOORS, elastic: Elastic | None = None, config: WatchdogConfig | None = None
    ) -> None:
        self.state: PolicyState = start(1)
        self.config = config or WatchdogConfig()
        self.floors = floors
        self.elastic = elastic or Elastic()
        self.at = 0.0
        self.actions: list[Action] = []
        self.returns: dict[Rung, int] = {}
        self.generation = 1
        self.released = 0
        self.last: Decision | None = None

    def sample(
        self,
        idle: int | None,
        kind: TrendClass = FLAT,
        *,
        free: int | None = None,
        blind: bool = False,
        forecast: Forecast | None = None,
        bps: float | None = None,
        foreign: int | None = 0,
        idle_for: float | None = None,
        owner: str | None = None,
        engine: EnginePhase = "serving",
        tell: bool = True,
    ) -> Decision:
        self.at += 1.0
        raw = None if blind else (idle if free is None else free)
        view = View(
            at=self.at,
            device=0,
            floors=self.floors,
            holdings=self.holdings(),
            free=None if raw is None else raw * MIB,
            idle_free=None if idle is None else idle * MIB + self.released,
            kind=kind,
            bytes_per_second=bps,
            forecast=forecast,
            fill_owner=owner,
            foreign=None if foreign is None else foreign * MIB,
            idle_for=idle_for,
            engine=engine,
        )
        self.state, decision = decide(self.state, view, self.config)
        self.last = decision
        if decision.action is not None:
            self.actions.append(decision.action)
            if tell and not decision.dry_run and not isinstance(decision.action, Reload):
                self.tell(decision.action)
        return decision

    def tell(self, action: Trim | Cap | Regrow) -> None:
        returned = 0
        if isinstance(action, Trim):
            returned = action.wanted or self.returns.get(action.rung, 0)
            self.released += returned
        self.state = told(self.state, Outcome(action, self.at, "ok" if returned else "noop", returned), self.holdings())

    def holdings(self) -> Holdings:
        elastic = replace(self.elastic, held=max(0, self.elastic.held - self.released))
        return Holdings(self.generation, self.released, elastic, ledger={"pool_cached": 8 * MIB})

    def run(self, count: int, idle: int, kind: TrendClass = FLAT, **more: object) -> list[Decision]:
        return [self.sample(idle, kind, **more) for _ in range(count)]  # type: ignore[arg-type]

    @property
    def rungs(self) -> list[Rung]:
        return [action.rung for action in self.actions if isinstance(action, Trim)]

    @property
    def reloads(self) -> list[Reload]:
        return [action for action in self.actions if isinstance(action, Reload)]


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


def near(seconds: float, requests: float = 10.0) -> Forecast:
    return Forecast(requests, seconds)


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
