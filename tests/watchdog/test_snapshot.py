"""Readings that are none are refused; freshness and unknowns stay apart from data."""

import pytest

from watchdog.snapshot import GIB, MIB, DeviceSnapshot, Elastic, Health, Reading


def test_a_reading_must_add_up() -> None:
    Reading(0.0, total=16 * GIB, free=GIB, used=14 * GIB, reserved=GIB)
    with pytest.raises(ValueError, match="total"):
        Reading(0.0, total=16 * GIB, free=GIB, used=15 * GIB, reserved=GIB)


@pytest.mark.parametrize(("total", "free"), [(0, 0), (-1, 0), (MIB, 2 * MIB), (MIB, -1)])
def test_nonsense_is_no_reading(total: int, free: int) -> None:
    with pytest.raises(ValueError, match="no memory reading"):
        Reading(0.0, total=total, free=free)


def test_what_the_source_does_not_say_is_none() -> None:
    reading = Reading(0.0, total=GIB, free=MIB, source="runtime")
    assert reading.used is None
    assert reading.own is None
    assert reading.other is None


def test_only_a_fresh_and_unfailed_reading_may_be_acted_on() -> None:
    reading = Reading(10.0, total=GIB, free=MIB)

    def device(health: Health, last: Reading | None = reading) -> DeviceSnapshot:
        return DeviceSnapshot(0, "GPU-0", "card", last, health)

    good = Health(attempted_at=10.0, succeeded_at=10.0, duration_s=0.001)
    assert device(good).fresh(12.0, 5.0) is reading
    assert device(good).fresh(16.0, 5.0) is None
    failing = Health(attempted_at=11.0, succeeded_at=10.0, duration_s=0.001, failures=1, error="NVML_ERROR_UNKNOWN")
    assert device(failing).fresh(12.0, 5.0) is None
    never = Health(attempted_at=10.0, succeeded_at=None, duration_s=2.0, failures=1)
    assert never.age(12.0) is None
    assert device(never, None).fresh(12.0, 5.0) is None


def test_elastic_memory_keeps_minimum_live_blocks_and_under_growth_half() -> None:
    elastic = Elastic(plan=100, held=90, minimum=10, busy=30)
    assert elastic.releasable(keep_half=False) == 60
    assert elastic.releasable(keep_half=True) == 40
    assert elastic.missing == 10
    assert Elastic(plan=100, held=20, minimum=30).releasable(keep_half=False) == 0
