"""Simulated cards and a tiny model for engines that are tested on them."""

from pathlib import Path

from engine.config import EngineConfig
from engine.load import parse
from engine.memory.simulated_gpus import FILE_NAME, SimulatedGpus
from engine.plan import simulate_cards
from tests.golden.cases import COMMITTED

MODEL = str(COMMITTED / "models/llama-Q4_1-s1/model.gguf")
MIB = 1 << 20


def simulated(folder: Path, *mib: int) -> SimulatedGpus:
    """Cards of so many MiB each, of which the driver keeps 615 and an engine takes some 620 before K and V."""
    simulate_cards(folder / FILE_NAME, [size * MIB for size in mib], 0.0)
    return SimulatedGpus.open(folder / FILE_NAME)


def config_on(folder: Path, **settings: object) -> EngineConfig:
    """Settings of an engine on the cards of `folder`."""
    given = {"model_path": MODEL, "threads": 1, "max_batch": 4, "prefill_chunk_idle": 512}
    cards = {"simulated_gpus": str(folder / FILE_NAME)}
    return EngineConfig(**given | cards | settings)  # type: ignore[arg-type]


def parsed():
    with open(MODEL, "rb") as file:
        return parse(MODEL, file.fileno(), "a build")
