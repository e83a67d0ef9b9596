"""Which choices are at the engine, which wait, and what becomes of the tokens that come back.

All of it runs on the event loop and never waits. Each step of the engine is one call of `on_step` for all sequences;
a token costs a look-up, its text and nothing else, and a request is woken once a step however many tokens it got.
A choice is in exactly one place: in the queue, at the engine, or ended.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from app.errors import ApiError, Draining, EngineUnavailable, GenerationFailed, QueueFull
from app.generation import Generation
from app.observer import NoObserver, Observer
from app.record import TOKEN_BYTES, Budget, ChoiceRequest, Outcome, Record, prompt_bytes
from app.text.stream import TextStream
from engine.client import EngineClient
from engine.messages import Failed, Step

log = logging.getLogger(__name__)

__all__ = ["Generation", "Limits", "Observer", "RequestScheduler"]

PACE_WINDOW_S = 30.0
RETRY_AFTER_UNKNOWN_S = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_queue` counts choices that wait; `max_inflight_bytes` counts bodies, records and output not yet taken."""

    max_queue: int = 256
    max_inflight_bytes: int = 512 << 20
    hold_s: float = 45.0
    """How long a request that came while there was no engine waits for one."""


class Pace:
    """Choices that end per second, as an average that forgets with PACE_WINDOW_S."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0

    def count(self, now: float) -> None:
        self._rate = self.rate(now) + 1 / PACE_WINDOW_S
        self._at = now

    def rate(self, now: float) -> float:
        return self._rate * math.exp((self._at - now) / PACE_WINDOW_S)


class RequestScheduler:
    """Admits requests, feeds one engine at a time with up to its `max_batch`, and hands its tokens to the requests.

    `token_bytes` is the bytes of each token id. `attach` and `detach` are the supervisor's; between them requests
    run, otherwise they wait in the queue, those that had run before in front.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        limits: Limits,
        observer: Observer | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._limits = limits
        self._observer: Observer = observer or NoObserver()
        self._budget = Budget(limits.max_inflight_bytes)
        self._pace = Pace()
        self._engine: EngineClient | None = None
        self._max_batch = 0
        self._next_sequence = 1
        self._queue: deque[Record] = deque()
        self._at_engine: dict[int, Record] = {}
        """What the engine has: also choices that ended here, until it says that their blocks have returned."""
        self._open: dict[int, Generation] = {}
        """The request of every choice that has not ended, by sequence."""
        self._held: dict[Generation, asyncio.TimerHandle] = {}
        self._draining = False
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    # What is where.

    @property
    def running(self) -> int:
        """Choices at the engine that have not ended."""
        return sum(record.outcome is None for record in self._at_engine.values())

    @property
    def waiting(self) -> int:
        """Choices in the queue of an engine that is there."""
        return len(self._queue) if self._engine is not None else 0

    @property
    def held(self) -> int:
        """Choices in the queue while there is no engine."""
        return len(self._queue) if self._engine is None else 0

    @property
    def inflight_bytes(self) -> int:
        return self._budget.used

    @property
    def draining(self) -> bool:
        return self._draining

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """For bytes of a request before its admission: count them with the callable, which raises QueueFull.

        They count until the block is left.
        """
        held = 0

        def count(amount: int) -> None:
            nonlocal held
            if self._budget.used + amount > self._budget.limit:
                self._refuse_for_memory()
            self._budget.used += amount
            held += amount

        try:
            yield count
        finally:
            self._budget.used -= held

    # Requests come and go.

    def admit(
        self, request_id: str, choices: list[ChoiceRequest], *, body_bytes: int = 0, cache_scope: str = ""
    ) -> Generation:
        """Take on one request; its choices run in the order given, after everything admitted before.

        Raises QueueFull, Draining or EngineUnavailable, and then keeps nothing of it.
        """
        held_bytes = body_bytes + prompt_bytes(choices)
        self._refuse_if_full(len(choices), held_bytes)
        now = time.monotonic()
        records = [
            Record(self._next_sequence + n, request_id, n, choice, self._text(choice), self._budget, cache_scope, now)
            for n, choice in enumerate(choices)
        ]
        self._next_sequence += len(records)
        generation = Generation(request_id, records, self, held_bytes)
        self._budget.used += held_bytes
        self._open.update((record.sequence, generation) for record in records)
        self._queue.extend(records)
        self._idle.clear()
        if self._engine is None:
            loop = asyncio.get_running_loop()
            self._held[generation] = loop.call_later(self._limits.hold_s, self._give_up_holding, generation)
        else:
            self._welcome(generation)
            self._feed()
        return generation

    def cancel(self, generation: Generation) -> None:
        """End what has not ended, tell the engine at once, drop output that nobody took."""
        self._end_all(generation, "cancelled")
        for record in generation.choices:
            record.discard()

    def fail(self, generation: Generation, error: ApiError) -> None:
        """End what has not ended with an error, which the consumer gets after the output before it."""
        if generation.open_choices:
            generation.failure = error
            self._end_all(generation, "failed")

    def drain(self) -> None:
        """Refuse everything new from now on; what was admitted goes on."""
        self._draining = True

    async def idle(self) -> None:
        """Wait until every admitted request has ended."""
        await self._idle.wait()

    def fail_all(self, error: ApiError) -> None:
        """End every request with `error`."""
        for generation in set(self._open.values()):
            self.fail(generation, error)

    # Engines come and go.

    def attach(self, engine: EngineClient, max_batch: int) -> None:
        """An engine is ready: what waits goes to it, in order of admission."""
        assert self._engine is None
        assert not self._at_engine
        self._engine = engine
        self._max_batch = max_batch
        for generation, timer in self._held.items():
            timer.cancel()
            self._welcome(generation)
        self._held.clear()
        self._feed()

    def detach(self) -> None:
        """The engine is gone: what it had not finished waits in front of the queue, to go on from its records."""
        lost = [record for record in self._at_engine.values() if record.outcome is None]
        self._engine = None
        self._at_engine.clear()
        for record in lost:
            record.resumed += 1
        self._queue.extendleft(sorted(lost, key=lambda record: record.sequence, reverse=True))

    def close(self) -> None:
        """There will be no engine any more: every request ends, and new ones are refused."""
        self._closed = True
        self.fail_all(EngineUnavailable())

    def on_step(self, step: Step) -> None:
        """Hand out what one step of the engine made known."""
        now = time.monotonic()
        at_engine = self._at_engine
        for sequence, cached in step.admitted:
            record = at_engine.get(sequence)
            if record is not None and record.cached_tokens is None:
                record.cached_tokens = cached
        self._hand_out(step, now)
        for sequence in step.released:
            record = at_engine.get(sequence)
            if record is not None and record.outcome is None:
                self.on_failed(Failed(sequence, "dropped", "the engine gave this request up without a reason"))
            at_engine.pop(sequence, None)
        self._observer.step(step.stats)
        self._feed()

    def on_failed(self, failed: Failed) -> None:
        """The engine cannot go on with one sequence; its request fails."""
        generation = self._open.get(failed.sequence)
        if generation is not None:
            log.warning("request=%s failed in the engine: %s: %s", generation.request_id, failed.code, failed.message)
            self.fail(generation, GenerationFailed(failed.code, failed.message))
        self._at_engine.pop(failed.sequence, None)
        self._feed()

    # Inside.

    def _hand_out(self, step: Step, now: float) -> None:
        news: list[Generation] = []
        gaps: list[float] = []
        stopped_here: list[int] = []
        count = 0
        for token in step.tokens:
            sequence = token.sequence
            record = self._at_engine.get(sequence)
            if record is None or record.outcome is not None:
                continue  # it ended here before the engine knew
            generation = self._open[sequence]
            count += 1
            if record.last_token_at is None:
                record.first_token_at = now
                self._observer.first_token(now - record.admitted_at)
            else:
                gap = now - record.last_token_at
                gaps.append(gap)
                if gap > record.longest_gap_s:
                    record.longest_gap_s = gap
            record.last_token_at = now
            finish = record.take(token)
            if not generation.has_news:
                generation.has_news = True
                news.append(generation)
            if finish is not None:
                if token.finish is None:
                    stopped_here.append(sequence)
                self._end(record, generation, finish, now)
        self._budget.used += TOKEN_BYTES * count
        if stopped_here and self._engine is not None:
            self._engine.cancel(stopped_here)
        if count:
            self._observer.tokens(count)
            self._observer.token_gaps(gaps)
        for generation in news:
            generation.wake()

    def _feed(self) -> None:
        engine = self._engine
        if engine is None:
            return
        while self._queue and len(self._at_engine) < self._max_batch:
            record = self._queue.popleft()
            self._at_engine[record.sequence] = record
            if record.submitted_at is None:
                record.submitted_at = time.monotonic()
            engine.submit(record.submit())

    def _end_all(self, generation: Generation, outcome: Outcome) -> None:
        now = time.monotonic()
        at_engine = []
        for record in generation.choices:
            if record.outcome is None:
                if record.sequence in self._at_engine:
                    at_engine.append(record.sequence)
                else:
                    self._queue.remove(record)
                self._end(record, generation, outcome, now)
        if at_engine and self._engine is not None:
            self._engine.cancel(at_engine)
        generation.wake()

    def _end(self, record: Record, generation: Generation, outcome: Outcome, now: float) -> None:
        """The one place where a choice ends."""
        record.end(outcome, now, generation.failure)
        del self._open[record.sequence]
        generation.open_choices -= 1
        if generation.is_admitted:
            self._pace.count(now)
            self._observer.finished(record)
        if not generation.open_choices:
            timer = self._held.pop(generation, None)
            if timer is not None:
                timer.cancel()
            generated = sum(len(record.generated_ids) for record in generation.choices)
            self._budget.used -= generation.held_bytes + TOKEN_BYTES * generated
        if not self._open:
            self._idle.set()

    def _welcome(self, generation: Generation) -> None:
        generation.is_admitted = True
        self._observer.request_admitted(generation)
        generation.wake()

    def _give_up_holding(self, generation: Generation) -> None:
        self._observer.rejected("engine_unavailable")
        self.fail(generation, EngineUnavailable("The engine is being restarted.", retry_after_s=RETRY_AFTER_UNKNOWN_S))

    def _refuse_if_full(self, choices: int, held_bytes: int) -> None:
        if self._draining:
            self._observer.rejected("draining")
            raise Draining
        if self._closed:
            self._observer.rejected("engine_unavailable")
            raise EngineUnavailable
        free = self._max_batch - len(self._at_engine) if self._engine is not None else 0
        if len(self._queue) + choices > self._limits.max_queue + free:
            self._observer.rejected("queue_full")
            raise QueueFull(retry_after_s=self._retry_after_s())
        if self._budget.used + held_bytes > self._budget.limit:
            self._refuse_for_memory()

    def _refuse_for_memory(self) -> NoReturn:
        self._observer.rejected("queue_full")
        raise QueueFull("The requests at hand take all the memory set aside.", retry_after_s=self._retry_after_s())

    def _retry_after_s(self) -> float:
        """Time in which the queue empties at the pace of late; the error bounds it."""
        rate = self._pace.rate(time.monotonic())
        return max(1, len(self._queue)) / rate if rate > 1e-3 else RETRY_AFTER_UNKNOWN_S

    def _text(self, choice: ChoiceRequest) -> TextStream:
        return TextStream(self._token_bytes, choice.stops, drop_leading_space=choice.drop_leading_space)
