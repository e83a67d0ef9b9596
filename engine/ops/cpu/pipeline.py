"""The step contract on the CPU: launched steps wait in line, `collect` computes the oldest.

Nothing runs beside the host here, so a launch only notes the plan, and by the time its step is computed the tokens that
the step before sampled are known. A step's rows are computed in slices of at most `SLICE_ROWS`: that bounds scratch and
keeps activations in the cache, and because no row depends on its neighbours it changes no bit.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.config import BLOCK_TOKENS
from engine.messages import Submit
from engine.model.layers import Decoder
from engine.ops.cpu.backend import CpuOps
from engine.ops.cpu.philox import philox_words
from engine.ops.rows import Rows, Span
from engine.sampling import BadLogits, SamplerState, sample
from engine.sequence import Sampled, StepPlan, StepResult

Floats = npt.NDArray[np.float32]

SLICE_ROWS = 256
MOST_IN_FLIGHT = 2


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    dropped: set[int] = field(default_factory=set)


class CpuPipeline:
    """engine.pipeline.Pipeline on the CPU kernels."""

    def __init__(self, decoder: Decoder, ops: CpuOps, vocab: int, max_batch: int) -> None:
        self.decoder = decoder
        self.ops = ops
        self._vocab = vocab
        self._samplers: list[SamplerState | None] = [None] * max_batch
        self._last_token = [0] * max_batch
        self._launched: deque[_Launched] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._launched)

    def admit(self, slot: int, submit: Submit, generated: list[int]) -> None:
        for token in (*submit.prompt_ids, *generated, *(token for token, _ in submit.sampling.logit_bias)):
            if not 0 <= token < self._vocab:
                raise ValueError(f"token id {token} is outside the vocabulary of {self._vocab}")
        self.drop(slot)
        self._samplers[slot] = SamplerState(submit.sampling, submit.prompt_ids, generated)

    def launch(self, plan: StepPlan) -> None:
        assert len(self._launched) < MOST_IN_FLIGHT
        self._launched.append(_Launched(plan))

    def drop(self, slot: int) -> None:
        for launched in self._launched:
            launched.dropped.add(slot)

    def collect(self) -> StepResult:
        if not self._launched:
            raise RuntimeError("no step is in flight")
        launched = self._launched.popleft()
        wanted, spans = self._work(launched)
        sampled, failed = [], []
        for (slot, index), logits in zip(wanted, self._last_logits(spans, len(wanted)), strict=True):
            state = self._samplers[slot]
            assert state is not None
            try:
                draw = sample(logits, state, index, philox_words)
            except BadLogits as error:
                failed.append((slot, str(error)))
                continue
            state.accept(draw.token)
            self._last_token[slot] = draw.token
            sampled.append(Sampled(slot, draw.token, draw.logprob, draw.top))
        return StepResult(launched.plan.step, sampled, tuple(failed))

    def rehearse(self) -> None:
        """Run every kernel that traffic can reach once, on block 0, which holds nothing yet."""
        self.decoder.logits(self.ops, self.decoder.hidden(self.ops, Rows.of([Span([0], 0, [0])])), np.array([0]))
        philox_words(np.arange(1), 0, 0, 0)

    def all_logits(self, tokens: Sequence[int], chunk: int) -> Iterator[Floats]:
        """Logits [up to chunk, vocab] of every position of one sequence, which takes the first blocks; for `eval`."""
        blocks = range(-(-len(tokens) // BLOCK_TOKENS))
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            x = self.decoder.hidden(self.ops, Rows.of([Span(part, start, blocks)]))
            yield self.decoder.logits(self.ops, x, np.arange(len(part)))

    def _work(self, launched: _Launched) -> tuple[list[tuple[int, int]], list[Span]]:
        """((slot, generated index) of every row to sample, spans of all rows): the former belong to the first spans."""
        plan = launched.plan
        rows = [row for row in plan.decode if row.slot not in launched.dropped]
        wanted = [(row.slot, row.generated_index) for row in rows]
        spans = [Span([self._last_token[row.slot]], row.position, row.blocks) for row in rows]
        chunk = plan.prefill
        if chunk is not None and chunk.slot not in launched.dropped:
            spans.append(Span(chunk.tokens, chunk.start, chunk.blocks))
            if chunk.completes:
                wanted.append((chunk.slot, chunk.generated_index))
        return wanted, spans

    def _last_logits(self, spans: Sequence[Span], count: int) -> Floats:
        """Compute all rows; the logits [count, vocab] of the last row of each of the first `count` spans."""
        last = []
        for part in slices(spans):
            x = self.decoder.hidden(self.ops, Rows.of([span for _, span, _ in part]))
            ends = np.cumsum([len(span.tokens) for _, span, _ in part]) - 1
            places = [end for end, (number, _, whole) in zip(ends, part, strict=True) if whole and number < count]
            last.append(self.ops.take(x, np.array(places, np.int64)))
        if count == 0:
            return np.empty((0, self._vocab), np.float32)
        rows = np.concatenate(last)
        return self.decoder.logits(self.ops, rows, np.arange(count))  # type: ignore[no-any-return]


def slices(spans: Sequence[Span]) -> Iterator[list[tuple[int, Span, bool]]]:
    """Spans cut into forwards of at most SLICE_ROWS rows: (number, part of that span, whether it is the last part)."""
    current: list[tuple[int, Span, bool]] = []
    room = SLICE_ROWS
    for number, span in enumerate(spans):
        at = 0
        while at < len(span.tokens):
            taken = span.tokens[at : at + room]
            at, room = at + len(taken), room - len(taken)
            part = Span(taken, span.start + at - len(taken), span.blocks)
            current.append((number, part, at == len(span.tokens)))
            if room == 0:
                yield current
                current, room = [], SLICE_ROWS
    if current:
        yield current
