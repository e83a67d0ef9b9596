"""The fake keeps the engine's contract as far as a service can tell."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

import pytest

from engine.errors import DoesNotFit, EngineDied
from engine.fake import FakeEngine
from engine.messages import Failed, LoadProgress, Sampling, Step, Submit


class Listener:
    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finish: dict[int, str | None] = {}
        self.steps: list[Step] = []
        self.failed: list[Failed] = []
        self.deaths: list[str] = []
        self.news = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.news.wait()
            self.news.clear()

    def on_progress(self, progress: LoadProgress) -> None:
        raise AssertionError(progress)

    def on_step(self, step: Step) -> None:
        self.steps.append(step)
        self.news.set()
        for token in step.tokens:
            assert self.finish.get(token.sequence) is None, "a token after the end"
            self.tokens[token.sequence].append(token.token)
            self.finish[token.sequence] = token.finish

    def on_failed(self, failed: Failed) -> None:
        self.failed.append(failed)

    def on_dead(self, reason: str) -> None:
        self.deaths.append(reason)

    @property
    def released(self) -> list[int]:
        return [sequence for step in self.steps for sequence in step.released]


def submit(sequence: int = 1, max_tokens: int = 5, **rest: object) -> Submit:
    given = {"prompt_ids": [1] * 10, "generated_ids": [], "sampling": Sampling(), "stop_ids": ()} | rest
    return Submit(sequence=sequence, max_tokens=max_tokens, **given)  # type: ignore[arg-type]


async def started(script: object, **options: object) -> tuple[FakeEngine, Listener]:
    listener = Listener()
    engine = FakeEngine(script, 1, listener, **options)  # type: ignore[arg-type]
    await engine.start()
    return engine, listener


async def settle(engine: FakeEngine) -> None:
    for _ in range(100):
        await asyncio.sleep(0)
    assert engine.sequences == set()
    assert engine.blocks_used == 0


async def test_limits_and_stops() -> None:
    engine, listener = await started(lambda message: iter([10, 11, 12, 2, 13]), max_context=14)
    engine.submit(submit(1, max_tokens=3))
    engine.submit(submit(2, max_tokens=100, stop_ids=(7, 2)))
    engine.submit(submit(3, max_tokens=100))
    await settle(engine)
    assert listener.tokens == {1: [10, 11, 12], 2: [10, 11, 12, 2], 3: [10, 11, 12, 2]}
    assert listener.finish == {1: "length", 2: "stop", 3: "length"}
    assert sorted(listener.released) == [1, 2, 3]


async def test_a_script_that_ends() -> None:
    engine, listener = await started([5, 6])
    engine.submit(submit(1, max_tokens=5))
    engine.submit(submit(2, max_tokens=5, stop_ids=(9, 8)))
    await settle(engine)
    assert listener.tokens == {1: [5, 6, 5, 6, 5], 2: [5, 6, 9]}


@pytest.mark.parametrize("done", range(6))
async def test_a_resumed_sequence_goes_on_where_it_was(done: int) -> None:
    script = [11, 12, 13, 14, 15, 16]
    engine, listener = await started(script)
    generated = script[:done]
    engine.submit(submit(1, max_tokens=6, generated_ids=generated))
    generated.append(99)  # the record goes on growing; over a socket the engine would not see it either
    await settle(engine)
    assert listener.tokens[1] == script[done:]


async def test_a_batch_is_full_and_the_rest_wait_in_order() -> None:
    engine, listener = await started([1], max_batch=2)
    for sequence in (1, 2, 3):
        engine.submit(submit(sequence, max_tokens=2))
    await settle(engine)
    assert [[token.sequence for token in step.tokens] for step in listener.steps] == [[1, 2], [1, 2], [3], [3]]
    assert [step.stats.waiting for step in listener.steps] == [1, 1, 0, 0]
    assert [sequence for step in listener.steps for sequence, _ in step.admitted] == [1, 2, 3]


async def test_cancelled_sequences_are_released_without_a_further_token() -> None:
    engine, listener = await started([1], max_batch=1)
    engine.submit(submit(1, max_tokens=1000))
    engine.submit(submit(2, max_tokens=1000))
    await listener.until(lambda: len(listener.steps) >= 3)
    before = list(listener.tokens[1])
    engine.cancel([1, 2, 77])
    engine.cancel([1])
    await settle(engine)
    assert sorted(listener.released) == [1, 2]
    assert listener.tokens[1] == before
    assert listener.tokens[2] == []


async def test_log_probabilities_are_there_when_asked_for() -> None:
    engine, listener = await started([4])
    engine.submit(submit(1, max_tokens=1, sampling=Sampling(logprobs=2)))
    engine.submit(submit(2, max_tokens=1, sampling=Sampling(logprobs=0)))
    engine.submit(submit(3, max_tokens=1))
    await settle(engine)
    shown = [(token.logprob, token.top) for token in listener.steps[0].tokens]
    assert shown == [(-0.5, [(4, -0.5), (5, -1.0)]), (-0.5, []), (None, None)]


async def test_cached_prompt_tokens() -> None:
    engine, listener = await started([4], cached=64)
    engine.submit(submit(1, prompt_ids=[1] * 100))
    engine.submit(submit(2, prompt_ids=[1] * 10))
    engine.submit(submit(3, cache_prompt=False))
    await settle(engine)
    assert listener.steps[0].admitted == [(1, 64), (2, 9), (3, 0)]
    assert listener.steps[0].stats.prefix_hits_total == 73


async def test_death() -> None:
    engine, listener = await started([1])
    engine.submit(submit(1, max_tokens=1000))
    await listener.until(lambda: len(listener.steps) >= 3)
    before = list(listener.tokens[1])
    engine.die("boom")
    assert listener.deaths == [], "told on a later turn"
    engine.submit(submit(2))
    engine.cancel([1])
    engine.die("again")
    await settle(engine)
    assert listener.deaths == ["boom"]
    assert await engine.wait() == "boom"
    assert listener.tokens == {1: before}


async def test_a_hung_engine_takes_everything_and_does_nothing_until_killed() -> None:
    engine, listener = await started([1])
    engine.hang()
    engine.submit(submit(1))
    engine.cancel([1])
    await asyncio.sleep(0.01)
    assert listener.steps == []
    assert engine.sequences == {1}
    engine.kill()
    await settle(engine)
    assert listener.deaths == ["killed"]


async def test_failures_of_single_sequences() -> None:
    engine, listener = await started([1], max_batch=1)
    engine.refuse_next("poison")
    for sequence in (1, 2, 3):
        engine.submit(submit(sequence, max_tokens=3))
    engine.fail(3, "oom_alone")
    await settle(engine)
    assert [(failed.sequence, failed.code) for failed in listener.failed] == [(1, "poison"), (3, "oom_alone")]
    assert listener.tokens == {2: [1, 1, 1]}


async def test_a_load_that_fails_and_a_death_while_loading() -> None:
    engine = FakeEngine([1], 1, Listener(), load_error=DoesNotFit("too large"))
    with pytest.raises(DoesNotFit, match="too large"):
        await engine.start()
    listener = Listener()
    engine = FakeEngine([1], 1, listener)
    start = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    engine.die("early")
    with pytest.raises(EngineDied, match="early"):
        await start
    await asyncio.sleep(0)
    assert listener.deaths == [], "start has said it"


async def test_stop_is_no_death() -> None:
    engine, listener = await started([1])
    engine.submit(submit(1, max_tokens=1000))
    await engine.stop(1)
    await settle(engine)
    assert listener.deaths == []


async def test_paced_steps() -> None:
    engine, listener = await started([1], step_s=0.001)
    engine.submit(submit(1, max_tokens=3))
    await listener.until(lambda: listener.finish.get(1) == "length")
    assert len(listener.steps) == 3
