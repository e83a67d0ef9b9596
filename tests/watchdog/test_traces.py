"""A thousand histories without growth and a thousand with it: how often the watchdog is wrong, and how early right.

One core replays them in about half a minute; the seeds are fixed, so a failure is a change and no bad luck.
"""

import statistics
from collections.abc import Callable

from tests.watchdog.traces import FEW, MOST, growing, quiet, replay
from watchdog.snapshot import GIB, MIB

COUNT = 1000


def test_without_growth_at_most_one_reload_in_a_thousand() -> None:
    reloads = {seed: replay(quiet(seed), stop_at_act=False).reloads for seed in range(COUNT)}
    wrong = {seed: count for seed, count in reloads.items() if count}
    assert sum(wrong.values()) <= 1, wrong


def test_with_growth_it_acts_before_the_reload_floor(record_property: Callable[[str, object], None]) -> None:
    missed, leads, few, few_missed = [], [], 0, 0
    for seed in range(COUNT):
        trace = growing(seed)
        crossing = trace.crossing
        assert crossing is not None, f"{seed}: a growing trace must reach its floor"
        acted = replay(trace, stop_at_act=True)
        if crossing < FEW:
            few += 1
            few_missed += acted.acted is None
        elif acted.acted is None:
            missed.append(seed)
        else:
            assert acted.lead is not None
            leads.append(acted.lead)
    counted = len(leads) + len(missed)
    record_property("acted", f"{len(leads)} of {counted}, median lead {statistics.median(leads)} requests")
    record_property("apart", f"{few - few_missed} of {few} that reach the floor in under {FEW} requests")
    assert len(leads) / counted >= 0.99, missed
    assert statistics.median(leads) >= 10
    assert few < COUNT // 10, "the exception must stay one"


def test_the_generator_covers_what_it_says() -> None:
    traces = [growing(seed) for seed in range(300)] + [quiet(seed) for seed in range(300)]
    assert {trace.name.split("/")[1] for trace in traces} == {
        *("linear", "stepped", "bursts"),
        *("flat", "steps", "fill", "owned fill", "neighbours"),
    }
    assert min(trace.baseline for trace in traces) < 200 * MIB
    assert max(trace.baseline for trace in traces) > 40 * GIB
    assert {trace.streams for trace in traces} == {1, 2, 4, 8, 16, 32}
    assert {trace.known for trace in traces} == {True, False}
    assert {trace.elastic.plan > 0 for trace in traces} == {True, False}
    assert all(0.5 * MIB <= trace.noise <= 8 * MIB for trace in traces)
    assert max(trace.dip / trace.baseline for trace in traces) > 0.7
    for trace in traces[:300]:
        assert trace.crossing is not None
        slope = (trace.lost[-1] - trace.lost[0]) / trace.requests / MIB
        assert 0.3 < slope < 14, "0.5 to 8 a request, and perhaps a first-use step"
        assert trace.crossing <= MOST + 32
    for trace in traces[300:]:
        assert trace.crossing is None or max(trace.foreign) > 0.0
