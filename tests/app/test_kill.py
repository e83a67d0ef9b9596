"""Streams of a real engine that is killed under them or replaced, once and again."""

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


Killer = Callable[[EngineSupervisor, list[Generation]], "asyncio.Task[int]"]


async def run(tokens: int, killer: Killer | None = None) -> list[list[str]]:
    """The texts of all requests, while `killer` does what it does; it tells how many engines that took."""
    launcher = EngineLauncher.open(EngineConfig(model_path=MODEL, threads=1, max_batch=3), {})
    scheduler = RequestScheduler(TOKEN_BYTES, Limits())
    supervisor = EngineSupervisor(launcher, launcher.config, scheduler, carry=launcher.carry)
    await supervisor.start()
    generations = [scheduler.admit(f"r{n}", choices) for n, choices in enumerate(requests(tokens))]
    killing = killer(supervisor, generations) if killer is not None else None
    texts = await asyncio.gather(*map(read, generations))
    if killing is not None:
        engines = await killing
        assert supervisor.generation == 1 + engines
        assert max(record.resumed for generation in generations for record in generation.choices) >= 1
    assert {len(record.generated_ids) for generation in generations for record in generation.choices} == {tokens}
    assert scheduler.inflight_bytes == 0
    await supervisor.stop(10)
    launcher.close()
    return texts


def kill_at(*counts: int) -> Killer:
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


def reload_at(*counts: int) -> Killer:
    """A planned reload at each of these numbers of tokens; what it carries over is not computed again."""

    async def reload(supervisor: EngineSupervisor, generations: list[Generation]) -> int:
        record = generations[0].choices[0]
        for count in counts:
            while len(record.generated_ids) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            supervisor.reload("operator")
            while supervisor.reloading:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert supervisor.ready is not None
            assert supervisor.ready.restored_blocks > 0
        return len(counts)

    return lambda supervisor, generations: asyncio.create_task(reload(supervisor, generations))


async def test_a_reload_changes_no_text(caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = await run(500)
    assert await run(500, reload_at(1)) == undisturbed
    assert caplog.text.count("is over, ok") == 1
    assert "is lost" not in caplog.text


async def test_kills_change_no_text(caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = await run(150)
    assert [len(text.split(">")) - 1 for texts in undisturbed for text in texts] == [150] * 4
    assert await run(150, kill_at(1, 60)) == undisturbed
    assert caplog.text.count("was killed by signal 9") == 2
