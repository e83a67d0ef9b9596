"""One thread, immutable snapshots, devices independent of each other, and a pace that follows the room left."""

import threading
import time
from collections.abc import Callable

import pytest

from tests.watchdog.scripted import Scripted
from watchdog.attribution import Ours
from watchdog.floors import floors_of
from watchdog.sampler import FASTEST_S, SLOWEST_S, Pace, Sampler, interval_s, pace_of
from watchdog.snapshot import GIB, MIB, Reading, Snapshot
from watchdog.source import SourceError


@pytest.fixture
def source() -> Scripted:
    return Scripted()


@pytest.fixture
def sampler(source: Scripted) -> Sampler:
    return Sampler(source, source.clock)


def test_before_the_first_sample_nothing_is_known(sampler: Sampler) -> None:
    shown = sampler.snapshot().devices[1]
    assert (shown.device, shown.uuid, shown.reading, shown.health.succeeded_at) == (1, "GPU-1", None, None)


def test_a_failing_device_is_blind_alone_and_recovers(source: Scripted, sampler: Sampler) -> None:
    sampler.sample()
    source.broken[1] = "gone"
    for _ in range(3):
        source.now += 1
        shown = sampler.sample()
    well, blind = shown.devices
    assert well.fresh(source.now, 5.0) is not None
    assert blind.fresh(source.now, 5.0) is None
    assert blind.reading is not None, "data stays apart from health"
    assert (blind.health.failures, blind.health.failures_total, blind.health.samples_total) == (3, 3, 4)
    assert (blind.health.error, blind.health.age(source.now)) == ("gone", 3.0)
    source.broken.clear()
    source.now += 1
    blind = sampler.sample().devices[1]
    assert blind.fresh(source.now, 5.0) is not None
    assert (blind.health.failures, blind.health.failures_total, blind.health.error) == (0, 3, None)


def test_a_slow_call_makes_its_device_blind_while_it_lasts_and_after(source: Scripted, sampler: Sampler) -> None:
    sampler.sample()
    source.now += 1
    during: list[Snapshot] = []
    read = source.read

    def looked_at(device: int, at: float) -> Reading:
        reading = read(device, at)
        during.append(sampler.snapshot())
        return reading

    source.read = looked_at  # type: ignore[method-assign]
    source.takes[0] = 2.5
    after = sampler.sample()
    assert during[0].devices[0].fresh(source.now, 60.0) is None
    assert during[0].devices[0].health.error == "a call has taken 2.5 s"
    assert during[0].devices[1].health.failures == 0
    assert after.devices[0].fresh(source.now, 60.0) is None
    assert after.devices[1].fresh(source.now, 60.0) is not None


def test_a_device_that_hangs_gets_a_tenth_of_the_threads_time(source: Scripted, sampler: Sampler) -> None:
    source.takes[0] = 3.0
    for _ in range(100):
        sampler.sample()
        source.now += 1
    assert source.reads[1] == 100
    assert 3 * source.reads[0] <= 0.1 * (source.now - 100) + 3


def test_samples_of_a_fallback_are_counted(source: Scripted, sampler: Sampler) -> None:
    sampler.sample()
    source.source = "runtime"
    health = sampler.sample().devices[0].health
    assert (health.samples_total, health.fallbacks_total) == (2, 1)


def test_own_bytes_are_carried_between_looks_at_the_process_list(source: Scripted, sampler: Sampler) -> None:
    sampler.attribute(Ours(frozenset({7}), "nvml"))
    for _ in range(50):
        shown = sampler.sample()
        source.now += 0.1
    reading = shown.devices[0].reading
    assert reading is not None
    assert (reading.own, reading.other, reading.own_source) == (GIB, 11 * GIB, "nvml")
    assert source.lists[0] == 1
    source.now += 5
    sampler.sample()
    assert source.lists[0] == 2


def test_a_process_that_was_listed_and_is_gone_holds_nothing_but_a_new_one_is_unknown(
    source: Scripted, sampler: Sampler
) -> None:
    def own() -> int | None:
        sampler.request(processes=True)
        reading = sampler.sample().devices[0].reading
        assert reading is not None
        return reading.own

    sampler.attribute(Ours(frozenset({5}), "nvml"))
    assert own() is None, "it may be there under another number"
    source.held = {5: GIB, 9: GIB}
    assert own() == GIB
    source.held = {9: GIB}
    assert own() == 0
    sampler.attribute(Ours(frozenset({6}), "nvml"))
    assert own() is None


def test_the_list_is_read_on_request_and_when_memory_moves(source: Scripted, sampler: Sampler) -> None:
    sampler.sample()
    sampler.request(processes=True)
    sampler.sample()
    assert source.lists == [2, 2]
    source.free[0] -= 20 * MIB
    source.now += 0.5
    sampler.sample()
    assert source.lists == [2, 2], "at most once a second"
    source.now += 0.5
    sampler.sample()
    assert source.lists == [3, 2]


def test_a_list_that_is_no_longer_told_makes_own_bytes_unknown(source: Scripted, sampler: Sampler) -> None:
    sampler.attribute(Ours(frozenset({7}), "nvml"))
    sampler.sample()
    source.held = None
    source.now += 6
    reading = sampler.sample().devices[0].reading
    assert reading is not None
    assert (reading.own, reading.other) == (None, None)


def test_the_lowest_free_is_kept_until_a_new_engine(source: Scripted, sampler: Sampler) -> None:
    for free in (4, 1, 3):
        source.free[0] = free * GIB
        shown = sampler.sample()
    assert shown.devices[0].lowest_free == GIB
    sampler.forget_lowest()
    assert sampler.sample().devices[0].lowest_free == 3 * GIB


def test_the_interval_shrinks_with_the_room() -> None:
    pace = Pace(urgent=100, relaxed=300)
    assert [interval_s(free, pace) for free in (1000, 300, 100, 0)] == [SLOWEST_S, SLOWEST_S, FASTEST_S, FASTEST_S]
    assert interval_s(200, pace) == pytest.approx((SLOWEST_S + FASTEST_S) / 2)


def test_the_device_with_the_least_room_sets_the_pace(source: Scripted, sampler: Sampler) -> None:
    floors = floors_of(baseline=4 * GIB, reserve=512 * MIB)
    for device in range(2):
        sampler.keep_pace(device, pace_of(floors))
    sampler.sample()
    assert sampler.interval_s() == SLOWEST_S
    source.free[1] = floors.reload
    sampler.sample()
    assert sampler.interval_s() == FASTEST_S
    source.broken[1] = "gone"
    sampler.sample()
    assert sampler.interval_s() == SLOWEST_S, "an old figure sets no pace"


def test_a_tight_device_is_not_read_in_haste_for_ever() -> None:
    floors = floors_of(baseline=80 * MIB, reserve=512 * MIB)
    assert floors.tight
    assert interval_s(80 * MIB, pace_of(floors)) == SLOWEST_S
    assert interval_s(32 * MIB, pace_of(floors)) == FASTEST_S


def test_the_thread_publishes_wakes_on_request_and_closes_its_source(source: Scripted) -> None:
    sampler = Sampler(source)
    published: list[Snapshot] = []
    sampler.start(published.append)
    until(lambda: bool(published))
    sampler.request()
    until(lambda: len(published) >= 2)
    assert [snapshot.sequence for snapshot in published[:2]] == [1, 2]
    assert published[1].at - published[0].at < SLOWEST_S, "it did not wait its second out"
    time.sleep(0.2)
    assert len(published) <= 3, "and asked once it samples once"
    assert sampler.stop()
    assert source.closed_by == "vram-sampler", "whoever calls the source closes it"
    assert "vram-sampler" not in {thread.name for thread in threading.enumerate()}


def test_stop_does_not_wait_for_a_call_that_hangs(source: Scripted) -> None:
    inside, leave = threading.Event(), threading.Event()

    def stuck(device: int, at: float) -> Reading:
        inside.set()
        leave.wait(10)
        raise SourceError("late")

    source.read = stuck  # type: ignore[method-assign]
    sampler = Sampler(source)
    sampler.start()
    inside.wait(10)
    assert not sampler.stop(timeout_s=0.05)
    leave.set()
    until(lambda: source.closed_by == "vram-sampler")


def until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to pass")
