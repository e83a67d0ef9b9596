"""Who computes what next: continuous batching with chunked prefill over paged state, one step behind the device.

A step is the decode of all running sequences, then at most one chunk of one prompt. `schedule` plans step n + 1 while
step n runs, so it knows how many tokens each sequence has but not which: a sequence that turns out to have ended at n
has one row too many in n + 1, whose token is dropped and whose text is never cached.

A slot and its blocks go back when the last launched step that names them has been collected. Until then a sequence is
`leaving`. Sequences run and are resumed in the order in which they came: the running ones are older than all that wait.
"""

from collections import deque
from dataclasses import dataclass, field

from engine.kv_cache.blocks import BlockPool
from engine.kv_cache.state import EveryKind, PagedKV, SequenceState, StateKind
from engine.messages import Failed, StepStats, Submit, Token
from engine.sequence import DecodeRow, PrefillChunk, Sampled, Sequence, StepPlan, StepResult

_TOKEN_IDS = range(2**31)


@dataclass(slots=True)
class Report:
    """What happened to sequences since the last report, apart from their tokens."""

    admitted: list[tuple[int, int]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class _Flight:
    """A launched step: for each slot in it, the sequence and how many of its tokens are stored afterwards."""

    step: int
    rows: dict[int, tuple[Sequence, int]]


class Scheduler:
    """Sequences of one engine, waiting and running, and their share of slots and state."""

    def __init__(
        self,
        pool: BlockPool,
        max_batch: int,
        max_context: int,
        prefill_chunk: int = 512,
        prefill_chunk_idle: int = 4096,
        prefill_chunk_fixed: bool = False,
        other_kinds: tuple[StateKind, ...] = (),
    ) -> None:
        self._pool = pool
        paged = PagedKV(pool)
        self._state: SequenceState = EveryKind((paged, *other_kinds)) if other_kinds else paged
        self._max_context = max_context
        self._chunk = prefill_chunk
        self._chunk_idle = prefill_chunk_idle
        self._chunk_fixed = prefill_chunk_fixed
        self._free_slots = list(reversed(range(max_batch)))
        self._by_id: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._leaving: list[Sequence] = []
        self._flights: deque[_Flight] = deque()
        self._launched_step = 0
        self._collected_step = 0
        self._dead_slots: list[int] = []
        self._report = Report()
        self._preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    @property
    def idle(self) -> bool:
        """Nothing to run and nothing to give back."""
        return not (self._by_id or self._leaving)

    def holding(self) -> list[Sequence]:
        """Every sequence that holds a slot and state."""
        return self._running + self._leaving

    def take_report(self) -> Report:
        report, self._report = self._report, Report()
        return report

    def take_dead_slots(self) -> list[int]:
        """Slots whose rows in launched steps nobody needs any more."""
        slots, self._dead_slots = self._dead_slots, []
        return slots

    def stats(self, decode_rows: int, prefill_tokens: int, seconds: float) -> StepStats:
        """Sizes as they are now, with those of the step just collected."""
        return StepStats(
            running=len(self._running),
            waiting=len(self._waiting),
            decode_rows=decode_rows,
            prefill_tokens=prefill_tokens,
            kv_blocks_used=self._pool.used,
            kv_blocks_cached=self._pool.cached,
            kv_blocks=self._pool.n_blocks,
            preemptions_total=self._preemptions,
            prefix_queries_total=self._prefix_queries,
            prefix_hits_total=self._prefix_hits,
            seconds=seconds,
        )

    # Coming and going.

    def add(self, submit: Submit) -> None:
        """Queue one sequence, or report it failed if no engine of this size could ever serve it."""
        prompt, generated = submit.prompt_ids, submit.generated_ids
        max_known = min(len(prompt) + submit.max_tokens, self._max_context)
        sequence = Sequence(submit, max_known, list(generated), launched=len(generated))
        assert submit.sequence not in self._by_id, f"sequence {submit.sequence} was submitted twice"
        if not prompt:
            self._refuse(submit, "bad_request", "the prompt has no tokens")
        elif any(min(ids) < 0 or max(ids) not in _TOKEN_IDS for ids in (prompt, generated) if ids):
            self._refuse(submit, "bad_request", "a token id is negative or over 2**31 - 1")
        elif sequence.known >= max_known:
            self._refuse(submit, "bad_request", f"{sequence.known} tokens leave nothing to generate up to {max_known}")
        elif not self._state.fits(max_known - 1):
            self._refuse(submit, "does_not_fit", f"no room for {max_known} tokens even with an empty cache")
        else:
            self._by_id[submit.sequence] = sequence
            self._waiting.append(sequence)

    def cancel(self, sequences: list[int]) -> None:
        """End sequences without a further token; those that ended already are passed over."""
        for sequence in sequences:
            if sequence in self._by_id:
                self._end(self._by_id[sequence])

    def cancel_all(self) -> None:
        self.cancel(list(self._by_id))

    def fail(self, sequence: Sequence, code: str, message: str) -> None:
        """End one sequence that cannot go on, and report why."""
        self._refuse(sequence.submit, code, message)
        self._end(sequence)

    def rollback(self, sequence: Sequence, length: int) -> None:
        """Cut a sequence's state to at most `length` tokens; what is known beyond that is computed again.

        No launched step may name the sequence.
        """
        assert sequence.last_step <= self._collected_step
        length = self._state.cut_point(sequence, min(length, sequence.computed))
        self._state.cut(sequence, length)
        sequence.computed = sequence.stored = length
        sequence.launched = len(sequence.generated)
        sequence.reading = True

    def _refuse(self, submit: Submit, code: str, message: str) -> None:
        self._report.failed.append(Failed(submit.sequence, code, message))

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = True
        del self._by_id[sequence.submit.sequence]
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        self._leave(sequence)

    def _preempt_youngest(self) -> Sequence:
        sequence = self._running.pop()
        self._waiting.appendleft(sequence)
        self._preemptions += 1
        self._leave(sequence)
        return sequence

    def _leave(self, sequence: Sequence) -> None:
        in_flight = sequence.last_step > self._collected_step
        if sequence not in self._leaving:
            if not in_flight:
                self._give_back(sequence)
                return
            self._leaving.append(sequence)
        # What a step has yet to store may be dropped unless the cache has handed it on already.
        if in_flight and sequence.ended and self._state.withdraw(sequence, sequence.stored):
            self._dead_slots.append(sequence.slot)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self.rollback(sequence, 0)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        if sequence.ended:
            self._report.released.append(sequence.submit.sequence)

    # Planning.

    def admit(self) -> Sequence | None:
        """Start the oldest waiting sequence if no other prompt is being read and there is room for its own."""
        if not self._waiting or not self._free_slots or any(sequence.reading for sequence in self._running):
            return None
        sequence = self._waiting[0]
        assert sequence.slot < 0, "a preempted sequence is given back by the turn that preempted it"
        # At least one token is computed, for its logits.
        matched = self._state.match(sequence, sequence.known - 1) if sequence.submit.cache_prompt else 0
        if not self._state.admits(sequence, matched, len(self._running)):
            assert self._running or self._leaving, "an empty engine has no room for a sequence that fits"
            return None
        self._waiting.popleft()
        self._start(sequence, matched)
        return sequence

    def _start(self, sequence: Sequence, matched: int) -> None:
        sequence.slot = self._free_slots.pop()
        self._state.restore(sequence, matched)
        reserved = self._state.reserve(sequence, sequence.known)
        assert reserved, "room that was promised is gone"
        sequence.computed = sequence.stored = matched
        sequence.reading = True
        self._running.append(sequence)
        if sequence.submit.cache_prompt:
            self._prefix_queries += sequence.known
            self._prefix_hits += matched
        self._report.admitted.append((sequence.submit.sequence, min(matched, len(sequence.submit.prompt_ids))))

    def schedule(self) -> StepPlan | None:
        """The next step, counted as launched; None when no sequence has anything to compute now."""
        step = self._launched_step + 1
        rows: dict[int, tuple[Sequence, int]] = {}
        reading = next((sequence for sequence in self._running if sequence.reading), None)
        if reading is not None and not self._make_room(reading, reading.known):
            reading = None
        decode = []
        # Oldest first. Preemption shortens the list at its end, so it never takes a sequence that has its row.
        for sequence in self._running:
            row = None if sequence.reading else self._decode_row(sequence)
            if row is not None:
                decode.append(row)
                sequence.last_step = step
                rows[row.slot] = sequence, row.position + 1
        chunk = None
        if reading in self._running:
            chunk = self._next_chunk(reading, alone=len(self._running) == 1)
            reading.last_step = step
            rows[chunk.slot] = reading, reading.computed
        if not rows:
            return None
        self._launched_step = step
        self._flights.append(_Flight(step, rows))
        return StepPlan(step, decode, chunk)

    def _decode_row(self, sequence: Sequence) -> DecodeRow | None:
        position = len(sequence.submit.prompt_ids) + sequence.launched - 1
        # The token at the limit is never computed on, and one more than this row's is there before it is launched.
        if position + 1 >= sequence.max_known or not self._make_room(sequence, position + 2):
            return None
        index = sequence.launched
        sequence.launched = index + 1
        sequence.computed = position + 1
        return DecodeRow(sequence.slot, position, sequence.blocks, index)

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Room for `length` tokens, or the most it will ever need, at the cost of younger sequences."""
        length = min(length, sequence.max_known - 1)
        while not self._state.reserve(sequence, length):
            # What is leaving comes back with the step in flight; this row waits for it.
            if self._leaving or self._preempt_youngest() is sequence:
                return False
        return True

    def _next_chunk(self, sequence: Sequence, alone: bool) -> PrefillChunk:
        start = sequence.computed
        if self._chunk_fixed:
            stop = (start // self._chunk + 1) * self._chunk
        else:
            stop = start + (self._chunk_idle if alone else self._chunk)
        stop = min(stop, sequence.known)
        sequence.computed = stop
        if stop == sequence.known:
            sequence.reading = False
            sequence.launched += 1
        if sequence.submit.cache_prompt:
            # Known tokens, and the step that stores them runs before any that reads them: sequences with the same
            # prompt that come right behind need not wait.
            self._state.commit(sequence, stop)
        tokens = sequence.tokens(start, stop)
        return PrefillChunk(
            sequence.slot, tokens, start, sequence.blocks, not sequence.reading, len(sequence.generated)
        )

    # Results.

    def apply(self, result: StepResult) -> list[Token]:
        """Take in the oldest launched step; its tokens, those of ended sequences left out."""
        flight = self._flights.popleft()
        assert flight.step == result.step, f"step {result.step} was collected, step {flight.step} was next"
        self._collected_step = result.step
        for slot, message in result.failed:
            sequence, _ = flight.rows[slot]
            if not sequence.ended:
                self.fail(sequence, "bad_row", message)
        for sequence, stored in flight.rows.values():
            if not sequence.ended:
                sequence.stored = stored
                if sequence.submit.cache_prompt:
                    self._state.commit(sequence, stored)
        accepted = ((flight.rows[sampled.slot][0], sampled) for sampled in result.sampled)
        tokens = [self._accept(sequence, sampled) for sequence, sampled in accepted if not sequence.ended]
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            if sequence.last_step <= self._collected_step:
                self._give_back(sequence)
            else:
                self._leaving.append(sequence)
        return tokens

    def _accept(self, sequence: Sequence, sampled: Sampled) -> Token:
        submit = sequence.submit
        sequence.generated.append(sampled.token)
        finish = None
        if sampled.token in submit.stop_ids:
            finish = "stop"
        elif sequence.known >= sequence.max_known:
            finish = "length"
        if finish is not None:
            self._end(sequence)
        return Token(submit.sequence, sampled.token, finish, sampled.logprob, sampled.top)
