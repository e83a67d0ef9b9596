"""Settings with which the policy would make no sense are refused by name."""

import pytest

from watchdog.config import FloorOverride, WatchdogConfig


@pytest.mark.parametrize("field", ["confirm", "trim_cooldown_s", "reload_horizon_s", "bridge_s", "rearm_s"])
def test_figures_must_be_positive(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        WatchdogConfig(**{field: 0})  # type: ignore[arg-type]


def test_no_automatic_reload_at_all_is_a_choice() -> None:
    assert WatchdogConfig(reload_per_hour=0).reload_per_hour == 0
    with pytest.raises(ValueError, match="reload_per_hour"):
        WatchdogConfig(reload_per_hour=-1)


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="mode"):
        WatchdogConfig(mode="perhaps")  # type: ignore[arg-type]


@pytest.mark.parametrize("floors", [(1, 2, 3), (3, 3, 1), (3, 2, 2), (3, 2, 0), (3, 2, -1)])
def test_floors_must_fall(floors: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="floors"):
        FloorOverride(*floors)
