"""Whatever happens to a request, at whichever moment: one end, the right text, and nothing left of it.

A request's life is run once undisturbed to count its awaits, and then once for every await and every thing that may
happen there: the client leaves, its time is over, the engine fails it, the engine dies, the next engine dies as well.
The engine is the real loop over real block accounting (`loop_engine`), whose tokens prove that it resumed rightly.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import ApiError, EngineUnavailable, GenerationFailed, RequestTimedOut
from app.generation import Generation
from app.observer import NoObserver
from app.record import ChoiceEvent, ChoiceRequest, Record
from app.recovery import Backoff, EngineSupervisor
from app.scheduler import Limits, RequestScheduler
from app.text.stream import TextStream
from engine.client import EngineEvents
from engine.messages import Sampling, Submit
from tests.app.loop_engine import LoopEngine
from tests.engine.scripted import VOCAB, expected_tokens

TOKEN_BYTES = [b"", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", *(bytes([97 + n % 5]) for n in range(VOCAB - 5))]
"""Few letters and pieces of characters, so that stop strings and held-back text are common."""

Returned = TypeVar("Returned")
Deed = Callable[["World", Generation], None]


def die(world: "World", generation: Generation) -> None:
    """A death while the first engine loads is another story: no service comes of it."""
    if world.supervisor.phase != "loading":
        world.engines[-1].kill()


def die_and_again(world: "World", generation: Generation) -> None:
    """The second death comes while the first is being mended, or shortly after."""
    die(world, generation)
    loop = asyncio.get_running_loop()

    def wait(turns: int) -> None:
        if turns:
            loop.call_soon(wait, turns - 1)
        else:
            die(world, generation)

    wait(world.turns_to_second_death)


def fail_in_engine(world: "World", generation: Generation) -> None:
    for record in generation.choices if world.engines else ():
        world.engines[-1].fail(record.sequence)


def run_out_of_time(world: "World", generation: Generation) -> None:
    generation.fail(RequestTimedOut(1))


def leave(world: "World", generation: Generation) -> None:
    generation.cancel()


def be_cut_off(world: "World", generation: Generation) -> None:
    world.tasks[generation.request_id].cancel()


DEEDS: tuple[Deed, ...] = (die, die_and_again, fail_in_engine, run_out_of_time, leave, be_cut_off)
HARMLESS = (die, die_and_again)


class CountedAwaits(Awaitable[Returned]):
    """Runs a coroutine and calls `at_await(n)` each time it is suspended for the n-th time."""

    def __init__(self, inner: Awaitable[Returned], at_await: Callable[[int], None]) -> None:
        self._inner = inner
        self._at_await = at_await
        self.count = 0

    def __await__(self) -> Generator[Any, Any, Returned]:
        steps = self._inner.__await__()
        try:
            waited = next(steps)
            while True:
                self.count += 1
                self._at_await(self.count)
                try:
                    answer = yield waited
                except BaseException as error:  # noqa: BLE001  # handed on, as `yield from` would
                    waited = steps.throw(error)
                else:
                    waited = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Books(NoObserver):
    """Counts what is said of each record."""

    def __init__(self) -> None:
        self.admitted: list[Generation] = []
        self.ends: Counter[int] = Counter()
        self.outcomes: dict[int, str | None] = {}
        self.tokens_seen = 0

    def request_admitted(self, generation: Generation) -> None:
        self.admitted.append(generation)

    def finished(self, record: Record) -> None:
        self.ends[record.sequence] += 1
        self.outcomes[record.sequence] = record.outcome

    def tokens(self, count: int) -> None:
        self.tokens_seen += count


@dataclass(frozen=True)
class Asked:
    """One request of a scenario."""

    prompt: tuple[int, ...]
    n: int
    max_tokens: int
    stop_ids: tuple[int, ...]
    stops: tuple[str, ...]
    logprobs: bool

    def choices(self) -> list[ChoiceRequest]:
        logprobs = 0 if self.logprobs else None
        return [
            ChoiceRequest(
                list(self.prompt),
                Sampling(seed=7, choice=choice, logprobs=logprobs),
                self.max_tokens,
                self.stop_ids,
                self.stops,
            )
            for choice in range(self.n)
        ]

    def expected(self) -> list["Told"]:
        """What each choice says when nothing happens to it, by the engine's own definition of its tokens."""
        return [self._expected(choice) for choice in self.choices()]

    def _expected(self, choice: ChoiceRequest) -> "Told":
        submit = Submit(1, choice.prompt_ids, [], choice.sampling, choice.max_tokens, choice.stop_ids)
        tokens, finish = expected_tokens(submit, max_context=200)
        stream, told = TextStream(TOKEN_BYTES, choice.stops), Told()
        for token in tokens:
            told.generated += 1
            if token in choice.stop_ids:
                break
            told.text += stream.feed(token)
            if stream.stopped:
                finish = "stop"
                break
        told.text += stream.flush()
        told.finish = finish
        told.infos = tokens[: stream.released] if self.logprobs else []
        return told


@dataclass
class Told:
    """What a client was told of one choice."""

    text: str = ""
    finish: str | None = None
    infos: list[int] = field(default_factory=list)
    generated: int = 0

    def add(self, event: ChoiceEvent) -> None:
        assert self.finish is None, "told more after the end"
        self.text += event.text
        self.finish = event.finish
        self.infos += [info.token for info in event.tokens]


class World:
    """One service's middle: scheduler, supervisor, engines, and the clients of a scenario."""

    def __init__(self, max_batch: int, n_blocks: int, turns_to_second_death: int) -> None:
        self.turns_to_second_death = turns_to_second_death
        self.engines: list[LoopEngine] = []
        self.books = Books()
        self.scheduler = RequestScheduler(TOKEN_BYTES, Limits(), self.books)
        self.supervisor = EngineSupervisor(self._engine, self.scheduler, backoff=Backoff(first_s=0.0))
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.told: dict[str, list[Told]] = {}
        self.errors: dict[str, BaseException] = {}
        self.generations: dict[str, Generation] = {}
        self._size = {"max_batch": max_batch, "n_blocks": n_blocks}
        self.surprises: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: self.surprises.append(context))

    def _engine(self, generation: int, events: EngineEvents) -> LoopEngine:
        self.engines.append(LoopEngine(generation, events, **self._size))
        return self.engines[-1]

    def send(self, name: str, asked: Asked, at_await: Callable[[int, Generation], None]) -> CountedAwaits[None]:
        """Start a client; its awaits are counted."""
        generation = self.scheduler.admit(name, asked.choices(), body_bytes=1000)
        self.generations[name] = generation
        self.told[name] = [Told() for _ in range(asked.n)]
        life = CountedAwaits(self._live(name, generation), lambda count: at_await(count, generation))
        self.tasks[name] = asyncio.ensure_future(self._keep(name, life))
        return life

    async def _live(self, name: str, generation: Generation) -> None:
        """What a route does with its generation."""
        async with generation:
            await generation.admitted()
            async for events in generation.events():
                for event in events:
                    self.told[name][event.index].add(event)
                await asyncio.sleep(0)  # sending

    async def _keep(self, name: str, life: Awaitable[None]) -> None:
        try:
            await life
        except (ApiError, asyncio.CancelledError) as error:
            self.errors[name] = error

    async def finish(self) -> None:
        """Until every client has ended and the engine has nothing left."""
        async with asyncio.timeout(5):
            await asyncio.gather(*self.tasks.values())
            await self.scheduler.idle()
            while self.supervisor.phase == "recovering" or not self.engines[-1].idle:  # noqa: ASYNC110  # test doubles
                await asyncio.sleep(0)

    def audit(self) -> None:
        """One end for every choice, and nothing is left of any."""
        assert self.surprises == []
        for generation in self.generations.values():
            for record in generation.choices:
                assert record.outcome is not None
                assert self.books.ends[record.sequence] == generation.is_admitted
                assert record.finished_at is not None
        scheduler = self.scheduler
        assert (scheduler.running, scheduler.waiting, scheduler.held) == (0, 0, 0)
        assert scheduler._at_engine == {}
        assert scheduler._held == {}
        assert scheduler._open == {}
        assert scheduler.inflight_bytes == 0
        engine = self.engines[-1]
        assert max(engine.steps_to_release.values(), default=0) <= 2
        assert engine.pool.used == 0
        assert engine.scheduler.holding() == []

    def check_told(self, name: str, asked: Asked, deed: Deed | None) -> None:
        """What the client of `name`, to whom `deed` happened, was told."""
        generation, error = self.generations[name], self.errors.get(name)
        for told, expected, record in zip(self.told[name], asked.expected(), generation.choices, strict=True):
            assert expected.text.startswith(told.text), "not a prefix of the undisturbed text"
            assert expected.infos[: len(told.infos)] == told.infos
            assert len(record.generated_ids) <= expected.generated
            if told.finish is not None:
                assert (told.text, told.finish, told.infos) == (expected.text, expected.finish, expected.infos)
                assert len(record.generated_ids) == expected.generated
            else:
                assert deed is not None, "an undisturbed request ends by itself"
                assert deed not in HARMLESS, "the death of an engine is nothing to the client"
                assert record.outcome in ("cancelled", "failed") or deed in (leave, be_cut_off)
        if deed is fail_in_engine:
            assert error is None or isinstance(error, GenerationFailed)
        elif deed is run_out_of_time:
            assert error is None or isinstance(error, RequestTimedOut)
        elif deed is not be_cut_off:
            assert error is None


@dataclass(frozen=True)
class Scenario:
    requests: tuple[Asked, ...]
    max_batch: int
    n_blocks: int
    turns_to_second_death: int
    late: bool
    """The clients come before the first engine is ready."""

    async def run(self, deed: Deed | None = None, at: int = 0) -> int:
        """Let `deed` happen to the first client at its await number `at`; the number of awaits of its life."""
        world = World(self.max_batch, self.n_blocks, self.turns_to_second_death)
        if not self.late:
            await world.supervisor.start()

        def happen(count: int, generation: Generation) -> None:
            if deed is not None and count == at:
                deed(world, generation)

        lives = [
            world.send(f"r{n}", asked, happen if n == 0 else lambda count, generation: None)
            for n, asked in enumerate(self.requests)
        ]
        if self.late:
            await asyncio.sleep(0)
            await world.supervisor.start()
        await world.finish()
        world.audit()
        for n, asked in enumerate(self.requests):
            own = deed if n == 0 else None
            world.check_told(f"r{n}", asked, own)
        await world.supervisor.stop(1)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return lives[0].count


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of deaths are not worth a line each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(tuple)
asks = st.builds(
    Asked,
    prompt=prompts,
    n=st.integers(1, 2),
    max_tokens=st.integers(1, 9),
    stop_ids=st.lists(st.integers(0, VOCAB - 3), max_size=6).map(tuple),
    stops=st.lists(st.text("abcde€😀", min_size=1, max_size=3), max_size=2).map(tuple),
    logprobs=st.booleans(),
)
scenarios = st.builds(
    Scenario,
    requests=st.lists(asks, min_size=1, max_size=3).map(tuple),
    max_batch=st.integers(1, 3),
    n_blocks=st.integers(8, 16),
    turns_to_second_death=st.integers(1, 15),
    late=st.booleans(),
)


def every_deed_at_every_await(scenario: Scenario) -> None:
    with asyncio.Runner() as runner:
        awaits = runner.run(scenario.run())
        for deed in DEEDS:
            for at in range(1, awaits + 1):
                runner.run(scenario.run(deed, at))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios)
def test_every_deed_at_every_await(scenario: Scenario) -> None:
    every_deed_at_every_await(scenario)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios)
def test_every_deed_at_every_await_at_length(scenario: Scenario) -> None:
    every_deed_at_every_await(scenario)


@settings(max_examples=30, deadline=None)
@given(scenarios, st.integers(0, 30))
def test_giving_up_for_good_at_any_turn(scenario: Scenario, turns: int) -> None:
    """When no engine can be had any more, every request that has not ended ends with engine_unavailable."""

    async def run() -> None:
        world = World(scenario.max_batch, scenario.n_blocks, 0)
        await world.supervisor.start()
        for n, asked in enumerate(scenario.requests):
            world.send(f"r{n}", asked, lambda count, generation: None)
        for _ in range(turns):
            await asyncio.sleep(0)
        world.scheduler.close()
        await world.finish()
        world.audit()
        for name, generation in world.generations.items():
            whole = all(record.finish_reason for record in generation.choices)
            assert isinstance(world.errors.get(name), type(None) if whole else EngineUnavailable)
        await world.supervisor.stop(1)

    asyncio.run(run())
