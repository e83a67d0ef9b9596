"""The scheduler over a reload: what is drained, what is held, what an engine has still to do."""

import asyncio

import pytest

from app.errors import DevicePressure, EngineUnavailable, QueueFull
from app.observer import NoObserver
from app.record import Record
from tests.app.test_scheduler import Bench, StillEngine, text


class Interruptions(NoObserver):
    def __init__(self) -> None:
        self.queued: list[int] = []
        self.at_engine: list[list[int]] = []
        self.again: list[int] = []
        self.held_s: list[float] = []

    def interrupted(self, queued: int, at_engine: list[Record]) -> None:  # type: ignore[override]
        self.queued.append(queued)
        self.at_engine.append([record.sequence for record in at_engine])

    def recomputed(self, tokens: int) -> None:
        self.again.append(tokens)

    def held(self, seconds: float) -> None:
        self.held_s.append(seconds)


def replace_engine(bench: Bench, *, crashed: bool = False) -> None:
    bench.scheduler.detach(crashed=crashed)
    bench.engine = StillEngine()
    bench.attach()


async def test_an_engine_that_is_drained_gets_nothing_more_and_is_listened_to() -> None:
    bench = Bench(max_batch=2).attach()
    first, second, queued = (bench.admit(name) for name in "abc")
    bench.scheduler.pause()
    late = bench.admit("d")
    assert bench.places == (2, 0, 2)
    bench.step([(1, 0, "length"), (2, 1)], released=[1])
    assert bench.engine.order == [1, 2], "a place is free, but it is to go"
    second.cancel()
    assert bench.engine.cancelled == [2]
    assert not late.is_admitted
    replace_engine(bench)
    assert bench.engine.order == [3, 4]
    assert late.is_admitted
    bench.step([(3, 0, "length"), (4, 0, "length")], released=[3, 4])
    assert [await text(generation) for generation in (first, queued, late)] == ["a", "a", "a"]
    assert bench.scheduler.inflight_bytes == 0


async def test_whoever_was_held_counts_from_its_admission() -> None:
    bench = Bench()
    generation = bench.admit()
    arrived = generation.choices[0].admitted_at
    await asyncio.sleep(0.02)
    bench.attach()
    assert generation.choices[0].admitted_at - arrived >= 0.02


async def test_arrivals_may_be_held_while_the_others_run() -> None:
    bench = Bench(max_batch=1, hold_s=0.05).attach()
    running, queued = bench.admit("a"), bench.admit("b")
    bench.scheduler.hold_arrivals(DevicePressure)
    late, too_late = bench.admit("c"), bench.admit("d")
    assert bench.places == (1, 1, 2)
    bench.step([(1, 0, "length")], released=[1])
    assert bench.engine.order == [1, 2], "what was admitted before goes on"
    bench.scheduler.admit_arrivals()
    assert (late.is_admitted, too_late.is_admitted) == (True, True)
    bench.step([(2, 0, "length")], released=[2])
    assert bench.engine.order == [1, 2, 3]
    bench.scheduler.hold_arrivals(DevicePressure)
    refused = bench.admit("e")
    with pytest.raises(DevicePressure):
        await refused.admitted()
    assert ("rejected", "device_pressure") in bench.diary.said
    for generation in (running, queued, late, too_late):
        generation.cancel()
    assert bench.scheduler.inflight_bytes == 0


async def test_an_engine_that_comes_under_pressure_takes_only_what_was_admitted() -> None:
    bench = Bench(hold_s=0.02).attach()
    bench.admit("a")
    bench.scheduler.detach(crashed=False)
    bench.scheduler.hold_arrivals(DevicePressure)
    late = bench.admit("b")
    bench.engine = StillEngine()
    bench.attach()
    assert bench.engine.order == [1]
    with pytest.raises(DevicePressure):
        await late.admitted()
    bench.scheduler.detach(crashed=False)
    later = bench.admit("c")
    bench.scheduler.admit_arrivals()
    assert not later.is_admitted, "there is no engine"
    with pytest.raises(EngineUnavailable):
        await later.admitted()


async def test_held_ones_count_in_the_queue() -> None:
    bench = Bench(max_queue=3)
    generations = [bench.admit() for _ in range(3)]
    with pytest.raises(QueueFull):
        bench.admit()
    generations[0].cancel()
    bench.admit()
    assert bench.scheduler.held == 3


async def test_what_is_computed_again_and_what_was_carried() -> None:
    bench = Bench(max_batch=4).attach()
    notes = Interruptions()
    bench.scheduler._observer = notes
    for _ in range(3):
        bench.admit(prompt=10)
    bench.step([(1, 0)], admitted=[(1, 0), (2, 0)])
    bench.step([(1, 0)])
    replace_engine(bench)
    assert bench.engine.order == [2, 3, 1], "the shortest first"
    assert (notes.queued, notes.at_engine) == ([0], [[2, 3, 1]])
    bench.step(admitted=[(1, 8), (2, 0), (3, 0)])
    assert notes.again == [12 - 8, 10], "the third had not begun"
    record = next(iter(bench.scheduler._at_engine.values()))
    assert record.cached_tokens == 0, "what the client is told does not change"
    bench.step([(1, 0)])
    bench.step([(1, 0)], admitted=[(1, 13)])
    assert notes.again == [4, 10], "a preemption within one engine is another matter"


async def test_more_than_the_prompt_may_be_in_the_cache() -> None:
    bench = Bench().attach()
    generation = bench.admit(prompt=3)
    bench.step(admitted=[(1, 5)])
    assert generation.choices[0].cached_tokens == 3


async def test_what_an_engine_has_to_do() -> None:
    bench = Bench(max_batch=3).attach()
    scheduler = bench.scheduler
    assert (scheduler.busy, scheduler.longest_prefill, scheduler.context_needed) == (False, 0, 0)
    first, second = bench.admit(prompt=5), bench.admit(prompt=20)
    assert (scheduler.busy, scheduler.longest_prefill, scheduler.context_needed) == (True, 20, 30)
    bench.step([(2, 0)])
    assert scheduler.longest_prefill == 5
    bench.step([(1, 0), (2, 0, "length")], released=[2])
    assert (scheduler.longest_prefill, scheduler.context_needed) == (0, 15)
    replace_engine(bench)
    assert scheduler.longest_prefill == 6, "from its beginning"
    first.cancel()
    second.cancel()
    assert (scheduler.longest_prefill, scheduler.busy) == (0, True), "its blocks are not back"


async def test_when_an_engine_should_be_back() -> None:
    scheduler = Bench().scheduler
    assert scheduler.retry_after_s == 10
    scheduler.expect_engine(30.0)
    assert scheduler.retry_after_s == pytest.approx(30.0, abs=0.5)
    scheduler.expect_engine(-1.0)
    assert scheduler.retry_after_s == 10, "it is late"
    scheduler.expect_engine(None)
    assert scheduler.retry_after_s == 10


async def test_a_replay_is_over_when_all_have_gone_on() -> None:
    bench = Bench(max_batch=2).attach()
    first, second, third = (bench.admit(name) for name in "abc")
    bench.scheduler.detach(crashed=False)
    bench.engine = StillEngine()
    over: list[str] = []
    bench.scheduler.attach(bench.engine, 2, lambda: over.append("over"))  # type: ignore[arg-type]
    bench.step([(1, 0)])
    assert over == []
    second.cancel()
    assert over == ["over"], "the third had not been interrupted"
    for generation in (first, third):
        generation.cancel()


async def test_suspects_return_by_halves_and_new_ones_wait() -> None:
    bench = Bench(max_batch=4).attach()
    generations = [bench.admit(name) for name in "abcd"]
    for _ in range(2):
        replace_engine(bench, crashed=True)
    assert bench.engine.order == [1, 2]
    bench.admit("new")
    assert bench.engine.order == [1, 2]
    bench.step([(1, 0)])
    assert bench.engine.order == [1, 2], "one of the two has not gone on"
    generations[1].cancel()
    assert bench.engine.order == [1, 2]
    bench.step([(1, 0)], released=[2])
    assert bench.engine.order == [1, 2, 3], "the next half"
    bench.step([(3, 0)])
    bench.step([(4, 0)])
    assert bench.engine.order == [1, 2, 3, 4, 5]
