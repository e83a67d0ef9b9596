"""Cards made by the plan are the cards that the watchdog reads."""

from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.memory.simulated_gpus import FILE_NAME, SimulatedGpus
from engine.plan import simulate_cards
from engine.plan.costs import COSTS
from watchdog.simulated import SimulatedSource

GIB = 1 << 30


def test_the_cards_are_empty_but_for_their_driver(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    cards = simulate_cards(path, [16 * GIB, 12 * GIB], release_s=0.0)
    source = SimulatedSource(path)
    readings = [source.read(device, 1.0) for device in range(2)]
    assert [(card.total, card.reserved, card.free) for card in cards] == [
        (reading.total, reading.reserved, reading.free) for reading in readings
    ]
    assert [reading.total for reading in readings] == [16 * GIB, 12 * GIB]
    assert readings[0].reserved == COSTS.driver_reserve


def test_an_earlier_runs_cards_are_set_anew(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    simulate_cards(path, [16 * GIB, 16 * GIB], release_s=0.0)
    simulate_cards(path, [8 * GIB], release_s=0.0)
    assert [card.total for card in SimulatedGpus.open(path).cards] == [8 * GIB]


def test_a_file_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text("a diary")
    with pytest.raises(ConfigError, match="holds no simulated cards"):
        simulate_cards(path, [GIB], release_s=0.0)
    assert path.read_text() == "a diary"
