"""Streams of a real engine whose process is killed under them, once and again."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from app.generation import Generation
from app.record import ChoiceRequest
from app.recovery import EngineSupervisor
from app.scheduler import Limits, RequestScheduler
from engine.client import EngineLauncher, EngineProcess
from engine.config import EngineConfig
from engine.messages import Sampling
from tests.golden.cases import COMMITTED

MODEL = str(COMMITTED / "models/llama-Q4_1-s1/model.gguf")
VOCAB = 640
TOKEN_BYTES = [b"<%d>" % token for token in range(VOCAB)]
TOKENS = 150

REQUESTS = [
    [ChoiceRequest([7, 8, 9], Sampling(temperature=0.0), TOKENS, ())],
    [ChoiceRequest(list(range(100)), Sampling(seed=n, choice=n, top_p=0.9), TOKENS, ()) for n in range(2)],
    [ChoiceRequest([50] * 70, Sampling(seed=3, repetition_penalty=1.3, frequency_penalty=0.5), TOKENS, ())],
]


async def read(generation: Generation) -> list[str]:
    texts = [""] * len(generation.choices)
    async with generation:
        async for events in generation.events():
            for event in events:
                texts[event.index] += event.text
    return texts


async def run(killer: Callable[[EngineSupervisor, list[Generation]], "asyncio.Task[int]"] | None) -> list[list[str]]:
    """The texts of all requests, while `killer` does what it does."""
    launcher = EngineLauncher.open(EngineConfig(model_path=MODEL, threads=1, max_batch=3), {})
    scheduler = RequestScheduler(TOKEN_BYTES, Limits())
    supervisor = EngineSupervisor(launcher, scheduler)
    await supervisor.start()
    generations = [scheduler.admit(f"r{n}", choices) for n, choices in enumerate(REQUESTS)]
    killing = killer(supervisor, generations) if killer is not None else None
    texts = await asyncio.gather(*map(read, generations))
    if killing is not None:
        kills = await killing
        assert supervisor.generation == 1 + kills
        assert generations[0].choices[0].resumed >= 1
    assert [
        record.generated_ids for g in generations for record in g.choices if len(record.generated_ids) != TOKENS
    ] == []
    assert scheduler.inflight_bytes == 0
    await supervisor.stop(10)
    launcher.close()
    return texts


def kill_at(*counts: int) -> Callable[[EngineSupervisor, list[Generation]], "asyncio.Task[int]"]:
    """kill -9 whenever the first choice has come to one of these numbers of tokens."""

    async def kill(supervisor: EngineSupervisor, generations: list[Generation]) -> int:
        record = generations[0].choices[0]
        for count in counts:
            while len(record.generated_ids) < count:  # noqa: ASYNC110  # nothing is told of single tokens
                await asyncio.sleep(0.001)
            engine = supervisor.engine
            assert isinstance(engine, EngineProcess)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            while supervisor.engine in (engine, None):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return len(counts)

    return lambda supervisor, generations: asyncio.create_task(kill(supervisor, generations))


async def test_the_texts_are_those_of_an_undisturbed_run(caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = await run(None)
    assert [len(text.split(">")) - 1 for texts in undisturbed for text in texts] == [TOKENS] * 4
    assert await run(kill_at(1, 60)) == undisturbed
    assert caplog.text.count("was killed by signal 9") == 2
