"""Which choices are at the engine, which wait, and what becomes of the tokens that come back.

All of it runs on the event loop and never waits. Each step of the engine is one call of `on_step` for all sequences;
a token costs a look-up, its text and nothing else, and a request is woken once a step however many tokens it got.
A choice is in exactly one place: in the queue, at the engine, or ended.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from app.errors import ApiError, Busy, EngineUnavailable, GenerationFailed
from app.generation import Generation
from app.held import Held
from app.limits import RETRY_AFTER_UNKNOWN_S, Intake, Limits
from app.observer import NoObserver, Observer
from app.record import TOKEN_BYTES, ChoiceRequest, Outcome, Record, prompt_bytes
from app.replay import Replay
from app.text.stream import TextStream
from engine.client import EngineClient
from engine.messages import Failed, Step

log = logging.getLogger(__name__)

__all__ = ["Generation", "Limits", "Observer", "RequestScheduler"]


class RequestScheduler:
    """Admits requests, feeds one engine at a time with up to its `max_batch`, and hands its tokens to the requests.

    `token_bytes` is the bytes of each token id. `attach`, `pause` and `detach` are the supervisor's: from the first to
    the second requests run, otherwise they wait in the queue, those that had run before in front. What arrives
    meanwhile is held: it is not admitted.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        limits: Limits,
        observer: Observer | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._observer: Observer = observer or NoObserver()
        self._intake = Intake(limits, self._observer)
        self._budget = self._intake.budget
        self._engine: EngineClient | None = None
        self._feeding = False
        """The engine takes new choices; else it is being drained, or there is none."""
        self._refusal: Callable[[], Busy] | None = None
        """Why arrivals are held although the engine takes what was admitted before them, if they are."""
        self._back_at: float | None = None
        """When an engine is expected to be there again."""
        self._max_batch = 0
        self._next_sequence = 1
        self._queue: deque[Record] = deque()
        self._at_engine: dict[int, Record] = {}
        """What the engine has: also choices that ended here, until it says that their blocks have returned."""
        self._open: dict[int, Generation] = {}
        """The request of every choice that has not ended, by sequence."""
        self._held = Held(limits.hold_s, self._give_up_holding)
        self._replay = Replay()
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
        return len(self._queue) if self._feeding else 0

    @property
    def held(self) -> int:
        """Choices that have arrived and are not admitted, and those in the queue while no engine takes them."""
        return self._held.choices + (0 if self._feeding else len(self._queue))

    @property
    def busy(self) -> bool:
        """The engine has something to do."""
        return bool(self._at_engine)

    @property
    def longest_prefill(self) -> int:
        """Tokens of the longest text that the engine may be computing from its beginning; 0 when all decode."""
        return max((r.length for r in self._at_engine.values() if not r.went_on and r.outcome is None), default=0)

    @property
    def context_needed(self) -> int:
        """Tokens that the longest of all requests at hand may come to."""
        records = [record for generation in set(self._open.values()) for record in generation.choices]
        return max((len(r.prompt_ids) + r.request.max_tokens for r in records if r.outcome is None), default=0)

    @property
    def retry_after_s(self) -> float:
        """In how many seconds an engine should be there again."""
        rest = 0.0 if self._back_at is None else self._back_at - time.monotonic()
        return rest if rest > 0 else RETRY_AFTER_UNKNOWN_S

    @property
    def inflight_bytes(self) -> int:
        return self._budget.used

    @property
    def draining(self) -> bool:
        return self._intake.draining

    def hold(self) -> AbstractContextManager[Callable[[int], None]]:
        """See Intake.hold."""
        return self._intake.hold()

    # Requests come and go.

    def admit(
        self, request_id: str, choices: list[ChoiceRequest], *, body_bytes: int = 0, cache_scope: str = ""
    ) -> Generation:
        """Take on one request; its choices run in the order given, after everything admitted before.

        Raises QueueFull, Draining or EngineUnavailable, and then keeps nothing of it.
        """
        held_bytes = body_bytes + prompt_bytes(choices)
        waiting = len(self._queue) + self._held.choices
        places = self._max_batch - len(self._at_engine) if self._feeding else 0
        self._intake.check(len(choices), held_bytes, waiting=waiting, places=places)
        now = time.monotonic()
        records = [
            Record(self._next_sequence + n, request_id, n, choice, self._text(choice), self._budget, cache_scope, now)
            for n, choice in enumerate(choices)
        ]
        self._next_sequence += len(records)
        generation = Generation(request_id, records, self, held_bytes)
        self._budget.used += held_bytes
        self._open.update((record.sequence, generation) for record in records)
        self._idle.clear()
        if self._feeding and self._refusal is None:
            self._welcome(generation)
            self._feed()
        else:
            self._held.add(generation)
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
        self._intake.draining = True

    async def idle(self) -> None:
        """Wait until every admitted request has ended."""
        await self._idle.wait()

    def fail_all(self, error: ApiError) -> None:
        """End every request with `error`."""
        for generation in set(self._open.values()):
            self.fail(generation, error)

    def hold_arrivals(self, refusal: Callable[[], Busy]) -> None:
        """Hold what arrives from now on, while what was admitted goes on; `refusal` is for whoever waits too long."""
        self._refusal = refusal

    def admit_arrivals(self) -> None:
        """The end of `hold_arrivals`."""
        self._refusal = None
        if self._feeding:
            self._welcome_held()

    # Engines come and go.

    def attach(self, engine: EngineClient, max_batch: int, when_replayed: Callable[[], None] = lambda: None) -> None:
        """An engine is ready: what waits goes to it, what was held is admitted.

        `when_replayed` is called once everything that had been interrupted has gone on or ended.
        """
        assert self._engine is None
        assert not self._at_engine
        self._engine = engine
        self._feeding = True
        self._back_at = None
        self._max_batch = max_batch
        if self._refusal is None:
            self._welcome_held()
        self._feed()
        self._replay.tell_when_over(when_replayed)

    def pause(self) -> None:
        """Give the engine nothing more: it is being drained. What it still says is taken; then comes `detach`."""
        self._feeding = False

    def detach(self, *, crashed: bool) -> None:
        """The engine is gone: what it had not finished waits in front of the queue, to go on from its records.

        The shortest comes first, so that most go on soonest. A request that is to blame for the crash fails.
        """
        at_engine = list(self._at_engine.values())
        self._engine = None
        self._feeding = False
        self._at_engine.clear()
        culprit = self._replay.interrupt(at_engine, crashed=crashed)
        lost = sorted(
            (record for record in at_engine if record.outcome is None),
            key=lambda record: (record.length, record.sequence),
        )
        self._observer.interrupted(queued=len(self._queue), at_engine=lost)
        self._queue.extendleft(reversed(lost))
        if culprit is not None:
            log.error("request=%s is given up: engines crash under it, also when it is alone", culprit.request_id)
            self.fail(self._open[culprit.sequence], GenerationFailed("poison", "The engine crashes at this request."))

    def expect_engine(self, in_s: float | None) -> None:
        """When the next engine should be there, for whoever is sent away until then."""
        self._back_at = None if in_s is None else time.monotonic() + in_s

    def close(self) -> None:
        """There will be no engine any more: every request ends, and new ones are refused."""
        self._intake.closed = True
        self.fail_all(EngineUnavailable())

    def on_step(self, step: Step) -> None:
        """Hand out what one step of the engine made known."""
        now = time.monotonic()
        at_engine = self._at_engine
        for sequence, cached in step.admitted:
            record = at_engine.get(sequence)
            if record is not None:
                self._note_start(record, cached)
        self._hand_out(step, now)
        if self._replay:
            self._replay.go_on([at_engine[token.sequence] for token in step.tokens if token.sequence in at_engine])
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

    def _note_start(self, record: Record, cached: int) -> None:
        """The engine starts this choice, or goes on with it, and has found so many of its tokens in the cache."""
        if record.cached_tokens is None:
            record.cached_tokens = min(cached, len(record.prompt_ids))
        elif record.resumed and not record.went_on:
            self._observer.recomputed(record.length - cached)

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
        if engine is None or not self._feeding:
            return
        for record in self._next():
            self._at_engine[record.sequence] = record
            if record.submitted_at is None:
                record.submitted_at = time.monotonic()
            engine.submit(record.submit())

    def _next(self) -> Iterable[Record]:
        """Whoever is next takes itself out of the queue."""
        places = self._max_batch - len(self._at_engine)
        if self._replay.suspects:
            for record in self._replay.next_suspects(self._at_engine.values())[:places]:
                self._queue.remove(record)
                yield record
            return
        while self._queue and places > 0:
            places -= 1
            yield self._queue.popleft()

    def _end_all(self, generation: Generation, outcome: Outcome) -> None:
        now = time.monotonic()
        at_engine = []
        for record in generation.choices:
            if record.outcome is None:
                if record.sequence in self._at_engine:
                    at_engine.append(record.sequence)
                elif generation.is_admitted:
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
        if self._replay:
            self._replay.go_on([record])
        if generation.is_admitted:
            self._intake.pace.count(now)
            self._observer.finished(record)
        if not generation.open_choices:
            if generation in self._held:
                self._observer.held(self._held.remove(generation))
            generated = sum(len(record.generated_ids) for record in generation.choices)
            self._budget.used -= generation.held_bytes + TOKEN_BYTES * generated
        if not self._open:
            self._idle.set()

    def _welcome(self, generation: Generation) -> None:
        generation.is_admitted = True
        self._queue.extend(generation.choices)
        self._observer.request_admitted(generation)
        generation.wake()

    def _welcome_held(self) -> None:
        now = time.monotonic()
        for generation in self._held:
            self._observer.held(self._held.remove(generation))
            for record in generation.choices:
                record.admitted_at = now
            self._welcome(generation)
        self._feed()

    def _give_up_holding(self, generation: Generation) -> None:
        if self._feeding and self._refusal is not None:
            refusal = self._refusal()
        else:
            refusal = EngineUnavailable("The engine is being restarted.", retry_after_s=self.retry_after_s)
        assert refusal.code is not None
        self._observer.rejected(refusal.code)
        self.fail(generation, refusal)

    def _text(self, choice: ChoiceRequest) -> TextStream:
        return TextStream(self._token_bytes, choice.stops, drop_leading_space=choice.drop_leading_space)
