"""Simulated cards and faults are held against each other before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from app.devices import NO_DEVICES
from app.settings import SIMULATED_GPUS, Settings
from app.simulation import simulate
from engine.errors import ConfigError
from engine.memory.simulated_gpus import FILE_NAME
from tests.app.process import TINY, ullage
from watchdog.snapshot import GIB
from watchdog.source import SourceError


def simulated(folder: Path, **fields: Any) -> Settings:
    return Settings(state_dir=str(folder), **fields)


def test_cards_are_there_for_engine_and_watchdog(tmp_path: Path) -> None:
    made = simulate(simulated(tmp_path, simulate_gpus="16GiB,12GiB", faults="poison=user:mallory,nvml=lost:5s@1"))
    source = made.devices.source
    assert [card.uuid for card in source.cards] == ["SIMULATED-0", "SIMULATED-1"]
    assert [source.read(device, 1.0).total for device in range(2)] == [16 * GIB, 12 * GIB]
    assert (made.poison, made.devices.own_source) == ("mallory", "simulated")
    made.devices.when_watching(10.0)
    assert source.read(0, 11.0).total == 16 * GIB
    with pytest.raises(SourceError, match="NVML is lost"):
        source.read(1, 11.0)
    assert source.read(1, 15.0).total == 12 * GIB


def test_faults_without_cards(tmp_path: Path) -> None:
    made = simulate(simulated(tmp_path, faults="poison=user:mallory"))
    assert (made.devices, made.poison) == (NO_DEVICES, "mallory")
    assert list(tmp_path.iterdir()) == []


def test_service_and_engine_mean_the_same_file() -> None:
    assert SIMULATED_GPUS == FILE_NAME


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"simulate_gpus": "big"}, "--simulate-gpus big: 'big' is no size"),
        ({"simulate_gpus": "17x1GiB"}, "17 cards, expected 1 to 16"),
        (
            {"simulate_gpus": "2GiB", "vram_reserve_mib": (2048,)},
            "--vram-reserve-mib 2048: device 0 has 2048 MiB in all",
        ),
        ({"simulate_gpus": "2x2GiB", "vram_reserve_mib": (1, 2, 3)}, "3 figures for 2 cards"),
        ({"simulate_gpus": "2GiB", "vram_reserve_later_mib": 1}, "there is no card without the first stage"),
        ({"simulate_gpus": "4GiB,2GiB", "vram_reserve_later_mib": 3000}, "--vram-reserve-later-mib 3000: device 1 has"),
        (
            {"simulate_gpus": "4GiB,2GiB", "vram_floors_mib": (2048, 2, 1)},
            "--vram-floors-mib 2048,2,1: the smallest device has 2048 MiB in all",
        ),
        ({"simulate_gpus": "2GiB", "faults": "melt=now"}, "--faults melt=now: there is no such fault; there are leak="),
        ({"simulate_gpus": "2GiB", "faults": "leak=4MiB/request@1"}, "there are 1 simulated cards"),
        ({"simulate_gpus": "2GiB", "faults": "nvml=lost:1s,nvml=lost:2s"}, "nvml can be lost only once"),
        ({"faults": "nvml=lost:1s@0"}, "there are no simulated cards; give --simulate-gpus"),
    ],
)
def test_what_makes_no_sense_is_one_line(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        simulate(simulated(tmp_path, **fields))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vram-floors-mib", "1,2,3"], "--vram-floors-mib 1,2,3: expected WARN,TRIM,RELOAD"),
        (["--simulate-gpus", "2GiB", "--vram-reserve-mib", "4096"], "--vram-reserve-mib 4096: device 0 has 2048 MiB"),
        (["--simulate-gpus", "2GiB", "--faults", "melt=now"], "--faults melt=now: there is no such fault"),
        (["--layer-split", "1,1"], "--layer-split: nothing reads it without --simulate-gpus"),
    ],
)
def test_a_check_finds_it(tmp_path: Path, flags: list[str], message: str) -> None:
    ports = ["--port", "0", "--ops-port", "0", "--state-dir", str(tmp_path)]
    done = ullage("serve", "--check", "--model", str(TINY), *ports, *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"ullage: {message}")
    assert done.stderr.count("\n") == 1
