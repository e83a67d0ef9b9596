"""The supervisor over scripted engines; what it does to requests at every await is in test_replay_properties."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from app.errors import Draining, EngineUnavailable, ShutDown
from app.generation import Generation
from app.observer import NoObserver
from app.record import ChoiceRequest
from app.recovery import Backoff, EngineSupervisor
from app.scheduler import Limits, RequestScheduler
from engine.client import EngineEvents
from engine.errors import EngineDied, EngineError, HandshakeError, LoadRefused
from engine.fake import FakeEngine
from engine.messages import LoadProgress, Sampling, Step

TOKEN_BYTES = [bytes([97 + n]) for n in range(26)]
SCRIPT = [n % 26 for n in range(200)]
TEXT = b"".join(TOKEN_BYTES[token] for token in SCRIPT).decode()
IMPATIENT = Backoff(first_s=0.0, tries=3)


class Restarts(NoObserver):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def engine_restarted(self, reason: str) -> None:
        self.reasons.append(reason)


class Bench:
    """`errors` says why the start of a generation fails."""

    def __init__(self, errors: dict[int, EngineError] | None = None, backoff: Backoff = IMPATIENT) -> None:
        self.engines: list[FakeEngine] = []
        self.errors = errors or {}
        self.observer = Restarts()
        self.scheduler = RequestScheduler(TOKEN_BYTES, Limits(), self.observer)
        self.supervisor = EngineSupervisor(self._make, self.scheduler, self.observer, backoff)
        self.on_step: Callable[[FakeEngine, Step], None] = lambda engine, step: None

    def _make(self, generation: int, events: EngineEvents) -> FakeEngine:
        engine = FakeEngine(SCRIPT, generation, events, max_batch=2, load_error=self.errors.get(generation))
        deliver = events.on_step

        def on_step(step: Step) -> None:
            deliver(step)
            self.on_step(engine, step)

        events.on_step = on_step  # type: ignore[method-assign]
        self.engines.append(engine)
        return engine

    def admit(self, tokens: int = 100) -> Generation:
        return self.scheduler.admit("r", [ChoiceRequest([1], Sampling(), tokens, ())])

    def die_at(self, *steps: tuple[int, int]) -> None:
        """(generation, step) after which that engine dies."""
        self.on_step = lambda engine, step: engine.die("told to") if (engine.generation, step.step) in steps else None


async def text(generation: Generation) -> str:
    async with generation:
        return "".join([event.text async for events in generation.events() for event in events])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # turns of the loop are what is waited for
            await asyncio.sleep(0)


async def test_the_first_start() -> None:
    bench = Bench()
    assert bench.supervisor.phase == "loading"
    ready = await bench.supervisor.start()
    assert bench.supervisor.phase == "ready"
    assert bench.supervisor.ready == ready
    assert bench.supervisor.generation == 1
    assert bench.supervisor.engine is bench.engines[0]
    assert await text(bench.admit()) == TEXT[:100]
    await bench.supervisor.stop(1)
    assert bench.observer.reasons == []


@pytest.mark.parametrize(
    "error", [LoadRefused("ModelFileError", "m.gguf: header: truncated"), EngineDied("killed"), HandshakeError("build")]
)
async def test_a_first_start_that_fails_is_told_and_not_tried_again(error: EngineError) -> None:
    bench = Bench({1: error})
    held = bench.admit()
    with pytest.raises(type(error), match=str(error)):
        await bench.supervisor.start()
    assert bench.supervisor.phase == "failed"
    assert bench.supervisor.failure is error
    assert bench.supervisor.failed.is_set()
    with pytest.raises(EngineUnavailable):
        await text(held)
    assert len(bench.engines) == 1


async def test_a_stream_goes_on_over_the_deaths_of_its_engines() -> None:
    bench = Bench()
    bench.die_at((1, 10), (2, 1), (3, 40))
    await bench.supervisor.start()
    streams = [bench.admit(tokens) for tokens in (100, 150, 70)]
    assert await asyncio.gather(*map(text, streams)) == [TEXT[:100], TEXT[:150], TEXT[:70]]
    assert [engine.generation for engine in bench.engines] == [1, 2, 3, 4]
    assert bench.supervisor.phase == "ready"
    assert bench.observer.reasons == ["crash"] * 3
    assert streams[0].choices[0].resumed == 3
    assert bench.scheduler.inflight_bytes == 0
    await bench.supervisor.stop(1)


async def test_requests_that_come_between_two_engines_are_held_and_then_run() -> None:
    bench = Bench(backoff=Backoff(first_s=0.02))
    bench.errors[2] = EngineDied("not yet")
    await bench.supervisor.start()
    running = bench.admit()
    bench.die_at((1, 5))
    first = asyncio.ensure_future(text(running))
    await until(lambda: bench.supervisor.phase != "ready")
    late = bench.admit(10)
    assert bench.scheduler.held == 2
    assert await asyncio.gather(first, text(late)) == [TEXT[:100], TEXT[:10]]
    assert [engine.generation for engine in bench.engines] == [1, 2, 3]
    await bench.supervisor.stop(1)


async def test_a_row_of_failed_starts_ends() -> None:
    bench = Bench({n: LoadRefused("DoesNotFit", "no room") for n in (2, 3, 4)})
    await bench.supervisor.start()
    bench.die_at((1, 5))
    with pytest.raises(EngineUnavailable):
        await text(bench.admit())
    assert bench.supervisor.phase == "failed"
    assert "no room (3 starts in a row failed)" in str(bench.supervisor.failure)
    with pytest.raises(EngineUnavailable):
        bench.admit()
    assert len(bench.engines) == 4
    assert bench.scheduler.inflight_bytes == 0
    await bench.supervisor.stop(1)


async def test_a_request_that_kills_every_engine_does_not_do_so_for_ever() -> None:
    """Engines that start and die without a token count as failed starts."""
    bench = Bench()
    await bench.supervisor.start()
    refuse_to_live = bench.admit()

    async def kill_each() -> None:
        while bench.supervisor.phase != "failed":
            if bench.supervisor.phase == "ready":
                bench.engines[-1].hang()
                bench.engines[-1].die("poisoned")
            await asyncio.sleep(0)

    killer = asyncio.create_task(kill_each())
    with pytest.raises(EngineUnavailable):
        await text(refuse_to_live)
    await killer
    assert "poisoned (3 starts in a row failed)" in str(bench.supervisor.failure)
    assert len(bench.engines) == 4


async def test_progress_breaks_the_row() -> None:
    bench = Bench()
    bench.die_at(*((generation, 1) for generation in range(1, 20)))
    await bench.supervisor.start()
    assert await text(bench.admit(15)) == TEXT[:15]
    assert len(bench.engines) >= 15
    await bench.supervisor.stop(1)


async def test_a_long_life_breaks_the_row() -> None:
    """An engine that nobody asked anything may die now and then for years."""
    bench = Bench(backoff=Backoff(first_s=0.0, tries=2, young_s=0.0))
    await bench.supervisor.start()
    for generation in range(1, 6):
        bench.engines[-1].die("of age")
        await until(lambda: bench.supervisor.generation > generation and bench.supervisor.phase == "ready")  # noqa: B023
    assert len(bench.engines) == 6
    await bench.supervisor.stop(1)


def test_waits_grow_and_are_bounded() -> None:
    backoff = Backoff(first_s=0.5, longest_s=8.0)
    assert [backoff.wait_s(n) for n in range(7)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


async def test_changed_files_are_said_and_not_respawned(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench({2: HandshakeError("files were changed: restart the service")})
    await bench.supervisor.start()
    bench.die_at((1, 5))
    with pytest.raises(EngineUnavailable):
        await text(bench.admit())
    assert len(bench.engines) == 2
    assert isinstance(bench.supervisor.failure, HandshakeError)
    assert "restart the service" in caplog.text


async def test_stop_ends_what_is_left() -> None:
    bench = Bench()
    await bench.supervisor.start()
    bench.engines[0].hang()
    generation = bench.admit()
    await bench.supervisor.stop(1)
    with pytest.raises(ShutDown):
        await text(generation)
    with pytest.raises(Draining):
        bench.admit()
    assert bench.supervisor.phase == "stopped"
    assert len(bench.engines) == 1


async def test_stop_while_recovering() -> None:
    bench = Bench(backoff=Backoff(first_s=60.0))
    bench.errors[2] = EngineDied("not yet")
    await bench.supervisor.start()
    generation = bench.admit()
    bench.die_at((1, 5))
    ended = asyncio.ensure_future(text(generation))
    await until(lambda: len(bench.engines) == 2)
    await bench.supervisor.stop(1)
    with pytest.raises(ShutDown):
        await ended
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_bug_in_recovery_is_not_silent(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    bench = Bench()
    await bench.supervisor.start()

    def broken(self: Backoff, failures: int) -> float:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Backoff, "wait_s", broken)
    generation = bench.admit()
    bench.die_at((1, 5))
    with pytest.raises(EngineUnavailable):
        await text(generation)
    assert "a bug" in str(bench.supervisor.failure)
    assert "ZeroDivisionError" in caplog.text


async def test_load_progress_is_passed_on() -> None:
    bench = Bench()
    await bench.supervisor.start()
    bench.engines[0].events.on_progress(LoadProgress("weights", 1, 2))
    assert bench.supervisor.progress == LoadProgress("weights", 1, 2)
    await bench.supervisor.stop(1)
