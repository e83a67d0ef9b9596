"""The scheduler against an engine that does nothing by itself: the test says what each step made known."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from app.errors import Draining, EngineUnavailable, GenerationFailed, QueueFull, RequestTimedOut, ShutDown
from app.generation import Generation
from app.observer import NoObserver
from app.record import ChoiceRequest, Record
from app.scheduler import PACE_WINDOW_S, Limits, Pace, RequestScheduler
from engine.messages import Failed, Sampling, Step, StepStats, Submit, Token

TOKEN_BYTES = [bytes([97 + n]) for n in range(26)]
STATS = StepStats(*[0] * 10, seconds=0.1)


class StillEngine:
    """Takes everything down."""

    generation = 1

    def __init__(self) -> None:
        self.submitted: list[Submit] = []
        self.cancelled: list[int] = []

    def submit(self, submit: Submit) -> None:
        self.submitted.append(submit)

    def cancel(self, sequences: list[int]) -> None:
        self.cancelled += sequences

    @property
    def order(self) -> list[int]:
        return [submit.sequence for submit in self.submitted]


class Diary(NoObserver):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def request_admitted(self, generation: Generation) -> None:
        self.said.append(("admitted", generation.request_id))

    def rejected(self, reason: str) -> None:
        self.said.append(("rejected", reason))

    def first_token(self, seconds: float) -> None:
        self.said.append("first token")

    def tokens(self, count: int) -> None:
        self.said.append(("tokens", count))

    def token_gaps(self, seconds: list[float]) -> None:
        self.said.append(("gaps", len(seconds)))

    def finished(self, record: Record) -> None:
        self.said.append(("finished", record.sequence, record.outcome, type(record.failure).__name__))

    def step(self, stats: StepStats) -> None:
        self.said.append(stats)


class Bench:
    def __init__(self, max_batch: int = 2, **limits: Any) -> None:
        self.diary = Diary()
        self.scheduler = RequestScheduler(TOKEN_BYTES, Limits(**limits), self.diary)
        self.engine = StillEngine()
        self.max_batch = max_batch
        self._steps = 0

    def attach(self) -> "Bench":
        self.scheduler.attach(self.engine, self.max_batch)  # type: ignore[arg-type]
        return self

    def admit(self, name: str = "r", n: int = 1, body_bytes: int = 0, **rest: Any) -> Generation:
        prompt = [1] * rest.pop("prompt", 3)
        choices = [ChoiceRequest(prompt, Sampling(choice=k), 10, (25,), **rest) for k in range(n)]
        return self.scheduler.admit(name, choices, body_bytes=body_bytes, cache_scope="s")

    def step(
        self,
        tokens: Sequence[tuple[int, int] | tuple[int, int, str]] = (),
        released: Sequence[int] = (),
        admitted: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._steps += 1
        made = [Token(*token) for token in tokens]
        self.scheduler.on_step(Step(self._steps, made, list(admitted), list(released), STATS))

    @property
    def places(self) -> tuple[int, int, int]:
        scheduler = self.scheduler
        return scheduler.running, scheduler.waiting, scheduler.held


async def text(generation: Generation) -> str:
    return "".join([event.text async for events in generation.events() for event in events])


async def test_first_come_first_served_up_to_the_batch() -> None:
    bench = Bench(max_batch=2).attach()
    for name in "abcd":
        bench.admit(name)
    assert bench.engine.order == [1, 2]
    assert bench.places == (2, 2, 0)
    bench.step([(1, 5, "length"), (2, 5)])
    assert bench.engine.order == [1, 2], "the place is free when the engine says so"
    assert bench.places == (1, 2, 0)
    bench.step([(2, 5)], released=[1])
    assert bench.engine.order == [1, 2, 3]
    bench.step(released=[2, 3])
    assert bench.engine.order == [1, 2, 3, 4]


async def test_tokens_become_events_one_wake_up_a_step() -> None:
    bench = Bench().attach()
    generation = bench.admit(n=2, stops=("xy",))
    bench.step(admitted=[(1, 2), (2, 0)])
    bench.step([(1, 0), (2, 1)])
    bench.step([(1, 2), (2, 23)])
    events = generation.events()
    assert [(event.index, event.text, event.finish) for event in await anext(events)] == [
        (0, "ac", None),
        (1, "b", None),
    ]
    waiting = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    bench.step([(1, 25, "stop"), (2, 24)], released=[1])
    assert [(event.index, event.text, event.finish) for event in await waiting] == [(0, "", "stop"), (1, "", "stop")]
    assert bench.engine.cancelled == [2], "the engine knows nothing of stop strings"
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    bench.step([(2, 5)])
    first, second = generation.choices
    assert (first.generated_ids, first.cached_tokens) == ([0, 2, 25], 2)
    assert (second.generated_ids, second.cached_tokens) == ([1, 23, 24], 0), "a token after the stop does not count"
    bench.step(released=[2])
    assert bench.scheduler.inflight_bytes == 0
    assert bench.diary.said[-1] == STATS


async def test_metrics_hear_of_everything_once() -> None:
    bench = Bench().attach()
    bench.admit("a", n=2)
    bench.step([(1, 0), (2, 0)])
    bench.step([(1, 0, "length"), (2, 25, "stop")])
    assert [item for item in bench.diary.said if item != STATS] == [
        ("admitted", "a"),
        "first token",
        "first token",
        ("tokens", 2),
        ("gaps", 0),
        ("finished", 1, "length", "NoneType"),
        ("finished", 2, "stop", "NoneType"),
        ("tokens", 2),
        ("gaps", 2),
    ]


async def test_leaving_cancels_in_the_same_turn_wherever_the_choices_are() -> None:
    bench = Bench(max_batch=1).attach()
    first, second, third = bench.admit("a"), bench.admit("b", n=2), bench.admit("c")
    second.cancel()
    assert bench.engine.cancelled == []
    assert bench.places == (1, 1, 0)
    async with first:
        pass
    first.cancel()
    assert bench.engine.cancelled == [1]
    assert bench.places == (0, 1, 0)
    bench.step([(1, 5)])
    assert bench.engine.order == [1], "its place is taken until its blocks are back"
    bench.step(released=[1])
    assert bench.engine.order == [1, 4]
    third.cancel()
    assert bench.scheduler.inflight_bytes == 0
    assert [record.outcome for record in (*first.choices, *second.choices, *third.choices)] == ["cancelled"] * 4


async def test_output_nobody_takes_counts_until_it_is_given_up() -> None:
    bench = Bench().attach()
    generation = bench.admit()
    for _ in range(5):
        bench.step([(1, 0)])
    bench.step([(1, 0, "length")], released=[1])
    assert bench.scheduler.inflight_bytes > 5
    assert await text(generation) == "aaaaaa"
    assert bench.scheduler.inflight_bytes == 0
    generation = bench.admit()
    bench.step([(2, 0, "length")], released=[2])
    assert bench.scheduler.inflight_bytes > 0
    generation.cancel()
    assert bench.scheduler.inflight_bytes == 0
    assert generation.choices[0].outcome == "length"


async def test_waiting_for_news_may_be_broken_off() -> None:
    bench = Bench().attach()
    events = bench.admit().events()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(events), 0.01)  # type: ignore[arg-type]
    bench.step([(1, 0)])
    assert (await anext(events))[0].text == "a"


async def test_silence_is_told() -> None:
    bench = Bench().attach()
    generation = bench.admit()
    events = generation.events(idle_s=0.01)
    assert await anext(events) == []
    bench.step([(1, 0)])
    assert (await anext(events))[0].text == "a"
    assert await anext(events) == []
    bench.step([(1, 1, "length")])
    assert (await anext(events))[0].finish == "length"
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_the_queue_is_bounded_in_choices() -> None:
    bench = Bench(max_batch=2, max_queue=3).attach()
    bench.admit(n=5)
    with pytest.raises(QueueFull) as caught:
        bench.admit()
    assert caught.value.status == 429
    assert 1 <= int(caught.value.headers["retry-after"]) <= 60
    assert bench.diary.said[-1] == ("rejected", "queue_full")
    bench.step([(1, 0, "length")], released=[1])
    bench.admit()
    with pytest.raises(QueueFull):
        bench.admit()


async def test_without_a_queue_only_free_places_count() -> None:
    bench = Bench(max_batch=2, max_queue=0).attach()
    bench.admit()
    bench.admit()
    with pytest.raises(QueueFull):
        bench.admit()


async def test_bytes_are_bounded() -> None:
    bench = Bench(max_inflight_bytes=100_000).attach()
    first = bench.admit(prompt=1000, body_bytes=10_000)
    before = bench.scheduler.inflight_bytes
    with pytest.raises(QueueFull, match="memory"):
        bench.admit(body_bytes=60_000)
    assert bench.scheduler.inflight_bytes == before
    first.cancel()
    bench.admit(body_bytes=60_000)


async def test_bytes_before_admission_count_while_they_are_held() -> None:
    bench = Bench(max_inflight_bytes=100_000).attach()
    with bench.scheduler.hold() as count:
        count(60_000)
        with pytest.raises(QueueFull):
            count(60_000)
        with pytest.raises(QueueFull):
            bench.admit(body_bytes=60_000)
    assert bench.scheduler.inflight_bytes == 0


def test_the_pace_of_late() -> None:
    pace = Pace()
    assert pace.rate(0.0) == 0
    for second in range(200):
        for _ in range(3):
            pace.count(float(second))
    assert pace.rate(200.0) == pytest.approx(3, rel=0.1)
    assert pace.rate(200.0 + PACE_WINDOW_S) == pytest.approx(3 / 2.718, rel=0.1)


async def test_retry_after_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(max_batch=1, max_queue=10).attach()
    bench.admit(n=11)
    for rate, seconds in ((2.0, 5), (0.1, 60), (1000.0, 1), (0.0, 10)):
        monkeypatch.setattr(bench.scheduler._pace, "rate", lambda now, rate=rate: rate)
        with pytest.raises(QueueFull) as caught:
            bench.admit()
        assert caught.value.headers["retry-after"] == str(seconds)


async def test_draining_and_idle() -> None:
    bench = Bench().attach()
    generation = bench.admit()
    bench.scheduler.drain()
    with pytest.raises(Draining):
        bench.admit()
    idle = asyncio.ensure_future(bench.scheduler.idle())
    await asyncio.sleep(0)
    assert not idle.done()
    bench.step([(1, 0, "length")])
    await idle
    assert await text(generation) == "a"


async def test_a_sequence_that_fails_fails_its_request_only() -> None:
    bench = Bench(max_batch=3).attach()
    failing, other = bench.admit("a", n=2), bench.admit("b")
    bench.admit("c")
    bench.step([(1, 0), (2, 1), (3, 2)])
    bench.scheduler.on_failed(Failed(1, "oom_alone", "no memory"))
    assert 2 in bench.engine.cancelled
    assert bench.engine.order == [1, 2, 3, 4], "its place is free at once"
    events = failing.events()
    assert [event.text for event in await anext(events)] == ["a", "b"]
    with pytest.raises(GenerationFailed) as caught:
        await anext(events)
    assert (caught.value.code, caught.value.status) == ("oom_alone", 500)
    assert [record.outcome for record in failing.choices] == ["failed", "failed"]
    assert ("finished", 1, "failed", "GenerationFailed") in bench.diary.said
    bench.scheduler.on_failed(Failed(1, "again", "no"))
    bench.scheduler.on_failed(Failed(99, "unknown", "no"))
    bench.step([(3, 0, "length")], released=[1, 2, 3])
    assert await text(other) == "ca"


async def test_a_sequence_that_is_released_without_an_end_is_not_left_hanging() -> None:
    bench = Bench().attach()
    generation = bench.admit()
    bench.step(released=[1])
    with pytest.raises(GenerationFailed):
        await text(generation)


async def test_a_time_limit_is_an_error_after_what_was_there() -> None:
    bench = Bench().attach()
    generation = bench.admit()
    bench.step([(1, 0)])
    generation.fail(RequestTimedOut(1))
    generation.fail(ShutDown())
    events = generation.events()
    assert (await anext(events))[0].text == "a"
    with pytest.raises(RequestTimedOut):
        await anext(events)
    assert bench.engine.cancelled == [1]


async def test_a_request_that_has_ended_cannot_fail() -> None:
    bench = Bench().attach()
    generation = bench.admit()
    bench.step([(1, 0, "length")], released=[1])
    generation.fail(ShutDown())
    assert await text(generation) == "a"


async def test_the_death_of_an_engine_puts_its_choices_in_front_in_order() -> None:
    bench = Bench(max_batch=3).attach()
    generations = [bench.admit(name) for name in "abcde"]
    bench.step([(1, 0), (2, 1), (3, 2)])
    bench.step([(1, 3), (2, 3, "length")])
    generations[2].cancel()
    bench.scheduler.detach()
    assert bench.places == (0, 0, 3)
    assert bench.engine.order == [1, 2, 3]
    bench.step([(1, 9)])
    bench.engine = StillEngine()
    bench.attach()
    assert bench.engine.order == [1, 4, 5]
    assert bench.engine.submitted[0].generated_ids == [0, 3]
    assert generations[0].choices[0].resumed == 1
    bench.step([(1, 25, "stop"), (4, 0, "length"), (5, 0, "length")], released=[1, 4, 5], admitted=[(1, 1)])
    assert [await text(generation) for generation in (*generations[:2], *generations[3:])] == ["ad", "bd", "a", "a"]
    assert bench.scheduler.inflight_bytes == 0


async def test_requests_that_come_while_there_is_no_engine_wait_for_it() -> None:
    bench = Bench()
    generation = bench.admit("a")
    admitted = asyncio.ensure_future(generation.admitted())
    await asyncio.sleep(0)
    assert bench.places == (0, 0, 1)
    assert bench.diary.said == []
    assert not admitted.done()
    bench.attach()
    await admitted
    await generation.admitted()
    assert bench.diary.said == [("admitted", "a")]
    assert bench.engine.order == [1]


async def test_the_wait_for_an_engine_is_bounded() -> None:
    bench = Bench(hold_s=0.01)
    generation = bench.admit()
    with pytest.raises(EngineUnavailable) as caught:
        await generation.admitted()
    assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "10")
    assert bench.diary.said == [("rejected", "engine_unavailable")], "it was never admitted, so it is not lost"
    assert bench.scheduler.inflight_bytes == 0
    assert bench.places == (0, 0, 0)


async def test_who_has_been_admitted_waits_for_the_next_engine_without_a_limit() -> None:
    bench = Bench(hold_s=0.01).attach()
    generation = bench.admit()
    bench.scheduler.detach()
    await asyncio.sleep(0.05)
    bench.engine = StillEngine()
    bench.attach()
    bench.step([(1, 0, "length")], released=[1])
    assert await text(generation) == "a"


async def test_leaving_while_held() -> None:
    bench = Bench()
    generation = bench.admit()
    generation.cancel()
    await generation.admitted()
    assert bench.diary.said == []
    bench.attach()
    assert bench.engine.order == []
    assert bench.scheduler.inflight_bytes == 0


async def test_when_there_will_be_no_engine_any_more() -> None:
    bench = Bench().attach()
    generation = bench.admit()
    bench.step([(1, 0)])
    bench.scheduler.detach()
    held = bench.admit()
    bench.scheduler.close()
    for ended in (generation, held):
        with pytest.raises(EngineUnavailable):
            await text(ended)
    with pytest.raises(EngineUnavailable):
        bench.admit()
    assert bench.scheduler.inflight_bytes == 0
