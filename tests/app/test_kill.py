"""Streams of a real engine that is killed under them or replaced, once and again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

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


def requests(tokens: int) -> list[list[ChoiceRequest]]:
    penalties = Sampling(seed=3, repetition_penalty=1.3, frequency_penalty=0.5)
    return [
        [ChoiceRequest([7, 8, 9], Sampling(temperature=0.0), tokens, ())],
        [ChoiceRequest(list(range(100)), Sampling(seed=n, choice=n, top_p=0.9), tokens, ()) for n in range(2)],
        [ChoiceRequest([50] * 70, penalties, tokens, ())],
    ]


async def read(generation: Generation) -> list[str]:
    texts = [""] * len(generation.choices)
    async with generation:
        async for events in generation.events():
            for event in events:
                texts[event.index] += event.text
    return texts


async def run(supervisor: EngineSupervisor, scheduler: RequestScheduler, tokens: int) -> tuple[list[list[str]], int]:
    """The texts of all requests, and the most engines that one choice has lost."""
    generations = [scheduler.admit(f"r{n}", choices) for n, choices in enumerate(requests(tokens))]
    texts = await asyncio.gather(*map(read, generations))
    records = [record for generation in generations for record in generation.choices]
    assert {len(record.generated_ids) for record in records} == {tokens}
    assert scheduler.inflight_bytes == 0
    return texts, max(record.resumed for record in records)


@pytest.fixture
async def engines() -> AsyncIterator[tuple[EngineSupervisor, RequestScheduler]]:
    launcher = EngineLauncher.open(EngineConfig(model_path=MODEL, threads=1, max_batch=3), {})
    scheduler = RequestScheduler(TOKEN_BYTES, Limits())
    supervisor = EngineSupervisor(launcher, launcher.config, scheduler, carry=launcher.carry)
    await supervisor.start()
    yield supervisor, scheduler
    await supervisor.stop(10)
    launcher.close()


Engines = tuple[EngineSupervisor, RequestScheduler]


async def test_reloads_change_no_text(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    supervisor, scheduler = engines
    undisturbed, _ = await run(supervisor, scheduler, 150)
    lost = 0
    for _ in range(2):
        supervisor.reload("operator")
        while supervisor.reloading:  # one round after the other, so that something runs whenever the cut comes
            texts, most = await run(supervisor, scheduler, 150)
            assert texts == undisturbed
            lost += most
        assert supervisor.ready is not None
        assert supervisor.ready.restored_blocks > 0
    assert lost >= 1
    assert caplog.text.count("is over, ok") == 2
    assert "is lost" not in caplog.text


async def test_kills_change_no_text(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    supervisor, scheduler = engines
    undisturbed, _ = await run(supervisor, scheduler, 150)
    assert [len(text.split(">")) - 1 for texts in undisturbed for text in texts] == [150] * 4
    running = asyncio.create_task(run(supervisor, scheduler, 150))
    for count in (1, 60):
        await has_said(scheduler, count)
        engine = supervisor.engine
        assert isinstance(engine, EngineProcess)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        while supervisor.engine in (engine, None):  # noqa: ASYNC110  # nothing is told of it here
            await asyncio.sleep(0.001)
    assert await running == (undisturbed, 2)
    assert caplog.text.count("was killed by signal 9") == 2
    assert supervisor.generation == 3


async def has_said(scheduler: RequestScheduler, count: int) -> None:
    """Until the first choice there is has so many tokens."""
    while not any(len(g.choices[0].generated_ids) >= count for g in scheduler._open.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
