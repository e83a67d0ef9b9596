"""Whatever is seen in whatever order: what the policy must never do."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from watchdog.actions import Outcome, Regrow, Reload, Rung, Trim
from watchdog.config import Mode, WatchdogConfig
from watchdog.floors import floors_of
from watchdog.policy import decide, reload_done, start, told
from watchdog.snapshot import GIB, MIB, Elastic, Holdings
from watchdog.state import PolicyState, State, View
from watchdog.trend import Forecast, TrendClass

Sample = tuple[int, int | None, int, TrendClass, float | None, float | None, float]
"""device, free and idle MiB, class, forecast in seconds, idle for, seconds since the sample before"""

SAMPLES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.one_of(st.none(), st.integers(0, 700)),
        st.integers(0, 700),
        st.sampled_from(TrendClass),
        st.one_of(st.none(), st.floats(0.0, 4000.0)),
        st.one_of(st.none(), st.floats(0.0, 20.0)),
        st.sampled_from((0.3, 1.0, 20.0, 200.0)),
    ),
    min_size=20,
    max_size=120,
)


@dataclass
class Seen:
    """The run so far, for the rules that look back."""

    reloads: list[float]
    acted_at: dict[int, float]


def look(at: float, sample: Sample) -> View:
    device, free, idle, kind, seconds, idle_for, _ = sample
    return View(
        at=at,
        device=device,
        floors=floors_of(600 * MIB, 512 * MIB),
        holdings=Holdings(1, 0, Elastic(4 * GIB, 3 * GIB, GIB), ledger={"pool_cached": 4 * MIB}),
        free=None if free is None else free * MIB,
        idle_free=idle * MIB,
        kind=kind,
        bytes_per_second=None if seconds is None else 0.1 * MIB,
        forecast=None if seconds is None else Forecast(seconds / 4, seconds),
        fill_owner="pool_cached" if kind is TrendClass.FILL else None,
        foreign=None if kind is TrendClass.UNKNOWN else 0,
        idle_for=idle_for,
    )


def play(samples: list[Sample], mode: Mode) -> PolicyState:
    config = WatchdogConfig(mode=mode)
    state, at, seen = start(2), 0.0, Seen([], {})
    for sample in samples:
        at += sample[-1]
        view = look(at, sample)
        before = state
        state, decision = decide(state, view, config)
        action = decision.action
        assert decision.reason
        assert not decision.hold or decision.state is State.DEGRADED
        if view.free is None:
            assert (decision.state, action) == (State.BLIND, None)
        if mode == "dry-run":
            assert (state.reloads, state.reloading) == ((), None)
            continue
        if action is None:
            continue
        assert at > seen.acted_at.get(view.device, -1.0), "a fresh sample lies between"
        assert before.devices[view.device].in_flight is None
        if isinstance(action, Reload):
            assert view.kind is not TrendClass.FOREIGN
            seen.reloads.append(at)
            assert sum(at - begun < 3600.0 for begun in seen.reloads) <= 2
            state = reload_done(state, at, (600 * MIB, 600 * MIB))
            seen.acted_at = {0: at, 1: at}
        else:
            if isinstance(action, Trim) and action.rung is Rung.ELASTIC:
                ours = view.kind in (TrendClass.GROWTH, TrendClass.FILL)
                assert action.wanted is not None
                assert 0 < action.wanted <= view.holdings.elastic.releasable(keep_half=ours)
            if isinstance(action, Regrow):
                assert 0 < action.wanted <= GIB
            state = told(state, Outcome(action, at, "noop"), view.holdings)
            seen.acted_at[view.device] = at
    return state


@settings(deadline=None, max_examples=150)
@given(SAMPLES)
def test_invariants(samples: list[Sample]) -> None:
    play(samples, "on")


@settings(deadline=None, max_examples=60)
@given(SAMPLES)
def test_a_dry_run_leaves_no_trace(
    samples: list[Sample],
) -> None:
    state = play(samples, "dry-run")
    for device in state.devices:
        assert (device.in_flight, device.degraded, device.lone_reload_at) == (None, None, None)
        assert device.ladder.empties == ()
