"""What a page opened later can show of the hours before."""

from typing import Any

from app.ops.history import EVERY_S, HOURS, History
from watchdog.floors import floors_of
from watchdog.snapshot import MIB, Health, Reading
from watchdog.status import DeviceStatus, Status

TOTAL = 16384 * MIB


def look(wall: float, free: int | None, idle: int | None = None, device: int = 0) -> Status:
    """One device at one moment, in MiB; without `free` it is blind."""
    reading = None if free is None else Reading(wall, TOTAL, free * MIB)
    floors = None if idle is None else floors_of(512 * MIB, 512 * MIB)
    shown = DeviceStatus(
        device,
        f"GPU-{device}",
        "card",
        Health(wall, wall, 0.0),
        reading=reading,
        idle_free=None if idle is None else idle * MIB,
        floors=floors,
    )
    return Status(wall, wall, (shown,))


def columns(*looks: Status) -> dict[str, Any]:
    history = History()
    for each in looks:
        history.add(each)
    [device] = history.json()["devices"]
    return dict(device)


def test_nothing_yet() -> None:
    assert History().json() == {"every_seconds": EVERY_S, "devices": []}


def test_a_point_keeps_the_lowest_free_and_the_latest_of_all_else() -> None:
    shown = columns(look(1000.0, 400, 500), look(1003.0, 90, 480), look(1009.9, 300, 470))
    assert shown["time"] == [1009.9]
    assert shown["free"] == [90 * MIB]
    assert shown["idle_free"] == [470 * MIB]
    floors = floors_of(512 * MIB, 512 * MIB)
    assert (shown["warn"], shown["trim"], shown["reload"]) == ([floors.warn], [floors.trim], [floors.reload])


def test_a_point_every_period() -> None:
    shown = columns(*(look(1000.0 + second, 400 - second, 500) for second in range(30)))
    assert shown["time"] == [1009.0, 1019.0, 1029.0]
    assert shown["free"] == [391 * MIB, 381 * MIB, 371 * MIB]


def test_unknown_is_null_and_hides_nothing() -> None:
    shown = columns(look(1000.0, None), look(1010.0, 90), look(1011.0, None))
    assert shown["free"] == [None, 90 * MIB]
    assert shown["idle_free"] == [None, None]
    assert shown["warn"] == [None, None]


def test_the_oldest_goes() -> None:
    most = HOURS * 3600 // EVERY_S
    shown = columns(*(look(1000.0 + EVERY_S * number, 400) for number in range(most + 5)))
    assert len(shown["time"]) == most
    assert shown["time"][0] == 1000.0 + EVERY_S * 5


def test_a_device_that_comes_later_has_its_own_times() -> None:
    history = History()
    history.add(look(1000.0, 400))
    later = look(1010.0, 300, device=1)
    history.add(Status(1010.0, 1010.0, (*look(1010.0, 390).devices, *later.devices)))
    first, second = history.json()["devices"]
    assert (first["device"], first["free"]) == (0, [400 * MIB, 390 * MIB])
    assert (second["device"], second["time"], second["free"]) == (1, [1010.0], [300 * MIB])
