"""Floors from R and B, the override, tight devices, hysteresis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchdog.config import FloorOverride
from watchdog.floors import Level, floors_of
from watchdog.snapshot import GIB, MIB


def test_the_motivating_card() -> None:
    floors = floors_of(142 * MIB, 700 * MIB)
    assert floors.extent == 142 * MIB
    assert floors.reload == 64 * MIB
    assert floors.trim == 80 * MIB
    assert floors.warn == 96 * MIB
    assert not floors.tight


def test_a_roomy_card_is_measured_against_its_reserve() -> None:
    floors = floors_of(60 * GIB, 512 * MIB)
    assert (floors.reload, floors.trim, floors.warn) == (128 * MIB, 512 * MIB * 45 // 100, 512 * MIB * 60 // 100)


def test_extent_ends_at_one_gib() -> None:
    assert floors_of(60 * GIB, 8 * GIB).reload == 256 * MIB


def test_the_largest_late_allocation_lifts_all_three() -> None:
    floors = floors_of(1 * GIB, 512 * MIB, largest_late=300 * MIB)
    assert (floors.reload, floors.trim, floors.warn) == (300 * MIB, 316 * MIB, 332 * MIB)
    assert floors.hold_under == 300 * MIB


def test_override_and_tight() -> None:
    floors = floors_of(1 * GIB, 512 * MIB, override=FloorOverride(2 * GIB, GIB, 512 * MIB))
    assert (floors.warn, floors.trim, floors.reload) == (2 * GIB, GIB, 512 * MIB)
    assert floors.tight
    assert floors_of(90 * MIB, 512 * MIB).tight


@pytest.mark.parametrize(
    ("free", "level"), [(300, Level.OK), (96, Level.OK), (95, Level.WARN), (79, Level.TRIM), (63, Level.RELOAD)]
)
def test_levels(free: int, level: Level) -> None:
    assert floors_of(142 * MIB, 700 * MIB).level(free * MIB) is level


def test_a_level_is_left_at_the_next_floor_plus_a_tenth() -> None:
    roomy = floors_of(60 * GIB, 512 * MIB)
    assert roomy.leave(Level.RELOAD) == roomy.trim * 11 // 10
    assert roomy.leave(Level.TRIM) == roomy.warn + roomy.warn // 10
    near = floors_of(100 * MIB, 512 * MIB)
    assert near.leave(Level.TRIM) == 98 * MIB, "at most half way from warn to B"


@given(
    baseline=st.integers(0, 200 * GIB),
    reserve=st.integers(1, 16 * GIB),
    late=st.integers(0, 4 * GIB),
    free=st.integers(0),
)
def test_floors_are_ordered_and_every_level_can_be_left(baseline: int, reserve: int, late: int, free: int) -> None:
    floors = floors_of(baseline, reserve, late)
    assert floors.warn >= floors.trim + 16 * MIB >= floors.reload + 32 * MIB
    level = floors.level(free)
    if level is not Level.OK:
        assert free < floors.leave(level)
    if not floors.tight:
        assert floors.leave(Level.WARN) <= max(baseline, floors.warn)
