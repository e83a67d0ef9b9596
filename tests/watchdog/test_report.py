"""The motivating report's table, replayed: what the watchdog would have said, and when."""

from dataclasses import dataclass

import pytest

from watchdog.actions import Reload
from watchdog.config import Mode, WatchdogConfig
from watchdog.floors import floors_of
from watchdog.snapshot import MIB, Holdings, Reading, Work
from watchdog.state import Decision, State
from watchdog.trend import TrendClass
from watchdog.watch import Watch, at_ready, step, view

TOTAL = 16 * 1024 * MIB
RESERVE = 700 * MIB
REQUEST_S = 90.0
FALLS = (6, 4, 4, 2, 4, 4, 2, 4, 2, 4, 2, 6)
STEP_REQUEST = 1
"""The first-use step comes with the first request; the table's falls with those after it."""


def later_device() -> list[int]:
    """Idle free MiB at load and after each request, until below 60."""
    values = [204, 142]
    while values[-1] >= 60:
        values.append(values[-1] - FALLS[(len(values) - 2) % len(FALLS)])
    return values


def first_device() -> list[int]:
    return [330, *[272] * (len(later_device()) - 1)]


@dataclass(frozen=True)
class Moment:
    request: int
    kind: TrendClass
    free: int
    decision: Decision
    forecast_requests: float | None


def replay(values: list[int], baseline: int, mode: Mode = "dry-run", streams: int = 1) -> list[Moment]:
    """Six samples a request of 90 s: at rest, four inside it (dips between the boundaries), one at its end."""
    config = WatchdogConfig(mode=mode)
    floors = floors_of(baseline * MIB, RESERVE)
    watch: Watch = at_ready((reading(0.0, values[0]),), (floors,), (Holdings(1),))
    moments: list[Moment] = []
    for request in range(1, len(values)):
        for sample in range(6):
            at = (request - 1) * REQUEST_S + 15.0 * (sample + 1)
            done = sample == 5
            free = values[request] if done else values[request - 1]
            dip = 0 if sample in (0, 4, 5) else 20
            work = Work(streams, request if done else request - 1, 114_972 * request, boundary=dip == 0)
            here, holdings = reading(at, free - dip), Holdings(1)
            watch, decision = step(watch, 0, at, here, work, holdings, config)
            seen = view(watch.devices[0], 0, at, here, work, holdings)
            near = seen.forecast.requests if seen.forecast is not None else None
            moments.append(Moment(request, seen.kind, free * MIB, decision, near))
    return moments


def reading(at: float, free: int) -> Reading:
    return Reading(at, TOTAL, free * MIB, own=TOTAL - free * MIB, source="simulated", own_source="simulated")


def crossing(moments: list[Moment]) -> int:
    return next(moment.request for moment in moments if moment.free < 64 * MIB)


def verdict(moments: list[Moment]) -> int:
    return next(index for index, moment in enumerate(moments) if moment.kind is TrendClass.GROWTH)


@pytest.fixture(scope="module")
def later() -> list[Moment]:
    return replay(later_device(), 142)


def test_growth_is_named_within_eight_windows_of_the_step(later: list[Moment]) -> None:
    assert later[verdict(later)].request - STEP_REQUEST <= 8


def test_dry_run_records_decisions_over_the_whole_trace_and_changes_nothing(later: list[Moment]) -> None:
    assert all(moment.decision.dry_run for moment in later)
    assert {moment.decision.state for moment in later} <= {State.OK, State.WATCH}
    assert not any(moment.decision.hold for moment in later)
    asked = [moment.request for moment in later if moment.decision.action is not None]
    assert asked[-1] >= later[-1].request - 1, "it goes on saying what it would do"


def test_the_first_due_reload_falls_between_verdict_and_floor(later: list[Moment]) -> None:
    set_at = next(index for index, moment in enumerate(later) if moment.decision.due is not None)
    told_at = next(index for index, moment in enumerate(later) if isinstance(moment.decision.action, Reload))
    assert verdict(later) < set_at < told_at
    assert later[told_at].free >= 64 * MIB
    assert later[told_at].request < crossing(later)


@pytest.mark.parametrize("request_number", [12, 13])
def test_the_forecast_at_the_twelfth_request_names_the_crossing(later: list[Moment], request_number: int) -> None:
    """The twelfth of the process, and the twelfth after the step."""
    moment = next(moment for moment in reversed(later) if moment.request == request_number)
    left = crossing(later) - request_number
    assert moment.forecast_requests == pytest.approx(left, rel=0.3)


def test_the_first_device_is_first_use_and_nothing_is_due() -> None:
    moments = replay(first_device(), 272)
    kinds = {moment.kind for moment in moments}
    assert kinds <= {TrendClass.FLAT, TrendClass.FIRST_USE}
    assert moments[-1].kind is TrendClass.FIRST_USE
    assert all(moment.decision.action is None and moment.decision.due is None for moment in moments)
    assert {moment.decision.state for moment in moments} == {State.OK}


def test_growth_is_found_with_32_streams_that_are_never_idle() -> None:
    moments = replay(later_device(), 142, streams=32)
    found = moments[verdict(moments)]
    assert found.free >= 64 * MIB
    assert all(moment.kind is not TrendClass.FOREIGN for moment in moments)
