"""The step contract on CUDA: what a step takes is copied from pinned memory, what it draws is copied back to it.

A launch queues copies and graphs on the streams of the stages and waits for nothing; `collect` waits for the event
after the oldest step's last copy. Host memory of a step is free again once it is collected.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

from engine.config import BLOCK_TOKENS
from engine.messages import Submit
from engine.model.config import ModelConfig
from engine.model.layers import Decoder
from engine.ops.cuda.forwards import Forward, forwards
from engine.ops.cuda.handover import hand_over, return_tokens
from engine.ops.cuda.sample import Drawn
from engine.ops.cuda.stage import Kind, Stage, StageParts
from engine.ops.cuda.tables import BlockTables, pinned
from engine.plan.graphs import GraphKeys
from engine.plan.scratch import GROUP_ROWS, PROMPT_TAIL_ROWS
from engine.sequence import Sampled, StepPlan, StepResult

Floats = npt.NDArray[np.float32]

LARGEST_CHUNK = 4096
"""More prompt tokens in one step make none of them faster."""
MOST_IN_FLIGHT = 2
_NOT_FINITE = "the greatest logit is not a finite number"


@dataclass(slots=True, eq=False)
class _Host:
    """Pinned memory of one forward and its sample."""

    inputs: Any
    sample_inputs: Any
    drawn: Drawn


@dataclass(slots=True, eq=False)
class _Launched:
    step: int
    parts: list[tuple[Forward, _Host]]
    done: Any


class CudaPipeline:
    """engine.pipeline.Pipeline over the stages of one decoder. `max_batch` sequences, each in a slot of its own."""

    def __init__(
        self, decoder: Decoder, parts: Sequence[StageParts], model: ModelConfig, *, max_batch: int, few_graphs: bool
    ) -> None:
        last = len(parts) - 1
        self.stages = [
            Stage(
                decoder,
                each,
                GraphKeys.of(max_batch, samples=number == last, few=few_graphs),
                first=number == 0,
                last=number == last,
            )
            for number, each in enumerate(parts)
        ]
        self._vocab = model.vocab
        self._tables = BlockTables([(stage.tables, stage.stream) for stage in self.stages])
        self._logprobs: list[int | None] = [None] * max_batch
        self._launched: deque[_Launched] = deque()
        self._host_memory = [
            self._allocate_host() for _ in range((MOST_IN_FLIGHT + 1) * (-(-max_batch // GROUP_ROWS) + 1))
        ]

    @property
    def in_flight(self) -> int:
        return len(self._launched)

    @property
    def last(self) -> Stage:
        return self.stages[-1]

    @property
    def _most_sampled(self) -> int:
        return len(self.last.room["logits"])

    def admit(self, slot: int, submit: Submit, generated: list[int]) -> None:
        for token in (*submit.prompt_ids, *generated, *(token for token, _ in submit.sampling.logit_bias)):
            if not 0 <= token < self._vocab:
                raise ValueError(f"token id {token} is outside the vocabulary of {self._vocab}")
        self._use(self.last)
        assert self.last.sampler is not None
        self.last.sampler.admit(slot, submit.sampling, submit.prompt_ids, generated, self.last.stream)
        self._logprobs[slot] = submit.sampling.logprobs
        self._tables.forget(slot)

    def drop(self, slot: int) -> None:
        """Nothing: what is queued is queued."""

    def launch(self, plan: StepPlan) -> None:
        assert len(self._launched) < MOST_IN_FLIGHT
        for row in plan.decode:
            self._tables.update(row.slot, row.blocks)
        if plan.prefill is not None:
            self._tables.update(plan.prefill.slot, plan.prefill.blocks)
        parts = []
        for forward in forwards(plan):
            host = self._host_memory.pop()
            self._queue(forward, host)
            parts.append((forward, host))
        done = cp.cuda.Event(disable_timing=True)
        done.record(self.last.stream)
        self._launched.append(_Launched(plan.step, parts, done))

    def collect(self) -> StepResult:
        if not self._launched:
            raise RuntimeError("no step is in flight")
        launched = self._launched.popleft()
        launched.done.synchronize()
        sampled: list[Sampled] = []
        failed: list[tuple[int, str]] = []
        for forward, host in launched.parts:
            for row, (_, slot, _) in enumerate(forward.sampled):
                if host.drawn.tokens[row] < 0:
                    failed.append((slot, _NOT_FINITE))
                else:
                    sampled.append(self._sampled(slot, host.drawn, row))
            self._host_memory.append(host)
        return StepResult(launched.step, sampled, tuple(failed))

    # Before "ready", and between steps.

    def warm(self) -> None:
        """Run every kernel that traffic can reach, on block 0, which holds nothing yet; waits until it is done."""
        chunk = len(self.stages[0].room["x"])
        for kind, m in self.last.graphs.keys:
            self._rehearse(kind, m)
        for rows in {min(PROMPT_TAIL_ROWS + 1, chunk), chunk}:
            self._rehearse("tail", rows)

    def capture(self) -> None:
        """All graphs of the plan; the kernels are warm. Each is launched once: a driver may take memory then."""
        for stage in self.stages:
            self._capture_missing(stage)
        for kind, m in self.last.graphs.keys:
            self._rehearse(kind, m)

    def halve_graphs(self, device: int) -> int:
        """Drop graphs that larger ones cover; how many."""
        return sum(stage.graphs.halve() for stage in self._on(device))

    def graphs_missing(self, device: int) -> int:
        return sum(len(stage.graphs.missing) for stage in self._on(device))

    def recapture(self, device: int) -> None:
        for stage in self._on(device):
            self._capture_missing(stage)

    def all_logits(self, tokens: Sequence[int], chunk: int) -> Iterator[Floats]:
        """Logits [up to GROUP_ROWS, vocab] of every position of one sequence, which takes the first blocks."""
        self._tables.forget(0)
        self._tables.update(0, range(-(-len(tokens) // BLOCK_TOKENS)))
        [host, *_] = self._host_memory
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            count = len(part)
            forward = Forward(part, range(start, start + count), [0] * count, one_sequence=True)
            self._forward(forward, host)
            for first in range(0, count, self._most_sampled):
                forward.sampled = [(row, 0, 0) for row in range(first, min(count, first + self._most_sampled))]
                m = self._copy_sample_inputs(forward, host)
                logits = self.last.logits(m)[: len(forward.sampled)]
                yield cp.asnumpy(logits, stream=self.last.stream)

    def synchronize(self) -> None:
        for stage in self.stages:
            self._use(stage)
            stage.stream.synchronize()

    def _rehearse(self, kind: Kind, m: int) -> None:
        host = self._host_memory.pop()
        if kind == "sample":
            # Of slots, not of padding, which does nothing; who is admitted to one sets it anew.
            drawn = [(0, slot % len(self._logprobs), 0) for slot in range(m)]
            self._copy_sample_inputs(Forward([0], [0], [0], one_sequence=False, sampled=drawn), host)
            self.last.sample(m)
        else:
            self._forward(Forward([0] * m, range(m), [0] * m, one_sequence=kind == "tail"), host)
        self.synchronize()
        self._host_memory.append(host)

    # One forward and its sample.

    def _queue(self, forward: Forward, host: _Host) -> None:
        self._forward(forward, host)
        if not forward.sampled:
            return
        m = self._copy_sample_inputs(forward, host)
        last = self.last
        last.sample(m)
        assert last.sampler is not None
        _to_host(host.drawn.all, last.sampler.drawn.all, last.stream)
        if len(self.stages) > 1:
            return_tokens(last, self.stages[0])

    def _forward(self, forward: Forward, host: _Host) -> None:
        count = len(forward.tokens)
        kind: Kind = "tail" if forward.one_sequence else "decode"
        captured = count <= (PROMPT_TAIL_ROWS if forward.one_sequence else GROUP_ROWS)
        m = self._rows(kind, count) if captured else count
        inputs = host.inputs[: 3 * m].reshape(3, m)
        forward.write(inputs)
        before = None
        for stage in self.stages:
            self._use(stage)
            _to_device(stage.forward_inputs(m), inputs, stage.stream)
            if before is not None:
                hand_over(before, stage, m)
            stage.forward(m, one_sequence=forward.one_sequence)
            before = stage

    def _copy_sample_inputs(self, forward: Forward, host: _Host) -> int:
        """The number of rows that the sample has, padding included."""
        m = self._rows("sample", len(forward.sampled))
        inputs = host.sample_inputs[: 3 * m].reshape(3, m)
        forward.write_sampled(inputs)
        self._use(self.last)
        _to_device(self.last.sample_inputs(m), inputs, self.last.stream)
        return m

    def _sampled(self, slot: int, drawn: Drawn, row: int) -> Sampled:
        token, count = int(drawn.tokens[row]), self._logprobs[slot]
        if count is None:
            return Sampled(slot, token)
        tokens, values = drawn.top_tokens[row, :count].tolist(), drawn.top_logprobs[row, :count].tolist()
        return Sampled(slot, token, float(drawn.logprobs[row]), list(zip(tokens, values, strict=True)))

    def _rows(self, kind: Kind, least: int) -> int:
        """The fewest rows, of those that all stages have, that hold `least`."""
        stages = [self.last] if kind == "sample" else self.stages
        common = set.intersection(*(stage.graphs.rows(kind) for stage in stages))
        return min(rows for rows in common if rows >= least)

    def _on(self, device: int) -> list[Stage]:
        return [stage for stage in self.stages if stage.device == device]

    def _capture_missing(self, stage: Stage) -> None:
        self._use(stage)
        for kind, m in stage.graphs.missing:
            stage.capture(kind, m)

    def _use(self, stage: Stage) -> None:
        cp.cuda.runtime.setDevice(stage.device)

    def _allocate_host(self) -> _Host:
        room, last = self.stages[0].room, self.last.room
        rows, samples = 3 * len(room["x"]), 3 * self._most_sampled
        return _Host(pinned((rows,)), pinned((samples,)), Drawn.of(pinned((last["drawn"].size,))))


def _to_device(target: Any, source: Any, stream: Any) -> None:
    kind = cp.cuda.runtime.memcpyHostToDevice
    cp.cuda.runtime.memcpyAsync(target.data.ptr, source.ctypes.data, target.nbytes, kind, stream.ptr)


def _to_host(target: Any, source: Any, stream: Any) -> None:
    kind = cp.cuda.runtime.memcpyDeviceToHost
    cp.cuda.runtime.memcpyAsync(target.ctypes.data, source.data.ptr, source.nbytes, kind, stream.ptr)
