"""Real engines as children of a test, with a tiny golden model."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.client import EngineLauncher
from engine.config import EngineConfig
from engine.messages import Failed, Ledger, LoadProgress, Sampling, Step, Submit
from tests.golden.cases import COMMITTED

MODEL = COMMITTED / "models/llama-Q4_1-s1/model.gguf"


class Listener:
    def __init__(self) -> None:
        self.phases: set[str] = set()
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str | None] = {}
        self.released: list[int] = []
        self.failed: list[Failed] = []
        self.deaths: list[str] = []
        self.ledgers: list[Ledger] = []
        self.steps: list[Step] = []
        self._news = asyncio.Event()

    def on_progress(self, progress: LoadProgress) -> None:
        self.phases.add(progress.phase)

    def on_step(self, step: Step) -> None:
        self.steps.append(step)
        for token in step.tokens:
            self.tokens.setdefault(token.sequence, []).append(token.token)
            self.finish[token.sequence] = token.finish
        self.released += step.released
        self._news.set()

    def on_failed(self, failed: Failed) -> None:
        self.failed.append(failed)
        self._news.set()

    def on_ledger(self, ledger: Ledger) -> None:
        self.ledgers.append(ledger)

    def on_dead(self, reason: str) -> None:
        self.deaths.append(reason)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await self._news.wait()
                self._news.clear()


def config(**settings: object) -> EngineConfig:
    return EngineConfig(**{"model_path": str(MODEL), "threads": 1, "max_batch": 4, **settings})  # type: ignore[arg-type]


@contextmanager
def launcher(**settings: object) -> Iterator[EngineLauncher]:
    made = EngineLauncher.open(config(**settings), {})
    yield made
    made.close()


def submit(sequence: int = 1, max_tokens: int = 50, **rest: object) -> Submit:
    given = {"prompt_ids": [10, 20, 30], "generated_ids": [], "sampling": Sampling(seed=5), "stop_ids": ()} | rest
    return Submit(sequence=sequence, max_tokens=max_tokens, **given)  # type: ignore[arg-type]
