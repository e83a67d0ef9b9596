"""An engine without a model: the contract of `engine.client.EngineClient`, in the service's process, on its loop.

It schedules as the real one does as far as the service can tell: continuous batch up to `max_batch`, one Step message
a step, stop ids and limits, resume after `generated_ids`, cancellation, release after the end. The tokens come from a
script. It can be told to die, to hang, to fail a sequence and to refuse to load.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.client import EngineEvents
from engine.config import BLOCK_TOKENS
from engine.errors import EngineDied, EngineError
from engine.messages import Failed, Ready, Step, StepStats, Submit, Token

Script = Callable[[Submit], Iterable[int]]


@dataclass(slots=True)
class _Running:
    submit: Submit
    tokens: Iterator[int]
    length: int
    """Generated tokens so far, those it resumed after included."""


@dataclass
class FakeEngine:
    """`script` gives a sequence's tokens from its first one on; a fixed list serves every sequence.

    When the script ends, a stop id of the sequence follows if it has one, else the script starts again. A step takes
    `step_s` seconds; at 0 the next one follows as soon as the event loop has handed out the last.
    """

    script: Script | Sequence[int]
    generation: int
    events: EngineEvents
    max_batch: int = 64
    max_context: int = 4096
    kv_blocks: int = 4096
    step_s: float = 0.0
    cached: int = 0
    """Prompt tokens that every start finds in the prefix cache, as far as the prompt is longer."""
    load_error: EngineError | None = None
    steps: int = 0
    _waiting: deque[Submit] = field(default_factory=deque)
    _running: dict[int, _Running] = field(default_factory=dict)
    _cancelled: list[int] = field(default_factory=list)
    _refusals: deque[str] = field(default_factory=deque)
    _next: asyncio.Handle | None = None
    _serving: bool = False
    _hung: bool = False
    _queried: int = 0
    _hits: int = 0

    async def start(self) -> Ready:
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)
        if self.load_error is not None:
            self._ended.set_result(str(self.load_error))
            raise self.load_error
        if self._ended.done():
            raise EngineDied(self._ended.result())
        self._serving = True
        return Ready(
            device="fake",
            max_context=self.max_context,
            max_batch=self.max_batch,
            kv_dtype="f32",
            kv_blocks=self.kv_blocks,
            kv_bytes=0,
            weight_bytes=0,
            load_seconds=0.0,
        )

    def submit(self, submit: Submit) -> None:
        if self._ended.done():
            return
        if self._refusals:
            self.fail(submit.sequence, self._refusals.popleft())
            return
        # A copy, as over a socket: the record behind it goes on growing.
        self._waiting.append(msgspec.structs.replace(submit, generated_ids=list(submit.generated_ids)))
        self._wake()

    def cancel(self, sequences: list[int]) -> None:
        if not self._ended.done():
            self._cancelled.extend(sequences)
            self._wake()

    async def stop(self, timeout_s: float) -> None:
        self._end("stopped")

    def kill(self) -> None:
        self.die("killed")

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    # What a test may do to it.

    def die(self, reason: str = "the fake engine was told to die") -> None:
        """End as a process does: nothing more is sent, and `on_dead` follows on a later turn of the loop."""
        if not self._ended.done():
            self._end(reason)
            if self._serving:
                asyncio.get_running_loop().call_soon(self.events.on_dead, reason)

    def hang(self) -> None:
        """Live, take everything and do nothing, until killed."""
        self._hung = True

    def refuse_next(self, code: str) -> None:
        """Answer the next Submit with Failed."""
        self._refusals.append(code)

    def fail(self, sequence: int, code: str) -> None:
        """Give up one sequence, on a later turn of the loop."""
        self._running.pop(sequence, None)
        self._waiting = deque(submit for submit in self._waiting if submit.sequence != sequence)
        failed = Failed(sequence, code, f"the fake engine was told to fail with {code}")
        asyncio.get_running_loop().call_soon(self.events.on_failed, failed)

    @property
    def sequences(self) -> set[int]:
        """Everything it still holds."""
        return {submit.sequence for submit in self._waiting} | self._running.keys()

    @property
    def blocks_used(self) -> int:
        return sum(-(-(len(r.submit.prompt_ids) + r.length) // BLOCK_TOKENS) for r in self._running.values())

    # One step.

    def _wake(self) -> None:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.call_later(self.step_s, self._step) if self.step_s else loop.call_soon(self._step)

    def _step(self) -> None:
        self._next = None
        if self._hung:
            return
        released = [sequence for sequence in self._cancelled if self._drop(sequence)]
        self._cancelled.clear()
        admitted = self._admit()
        tokens = [self._extend(sequence, running) for sequence, running in self._running.items()]
        for token in tokens:
            if token.finish is not None:
                del self._running[token.sequence]
                released.append(token.sequence)
        self.steps += 1
        if self._running or self._waiting:
            self._wake()
        self.events.on_step(Step(self.steps, tokens, admitted, released, self._stats(len(tokens))))

    def _drop(self, sequence: int) -> bool:
        if self._running.pop(sequence, None) is not None:
            return True
        kept = deque(submit for submit in self._waiting if submit.sequence != sequence)
        found = len(kept) < len(self._waiting)
        self._waiting = kept
        return found

    def _admit(self) -> list[tuple[int, int]]:
        admitted = []
        while self._waiting and len(self._running) < self.max_batch:
            submit = self._waiting.popleft()
            length = len(submit.generated_ids)
            self._running[submit.sequence] = _Running(submit, self._tokens(submit, length), length)
            cached = min(self.cached, len(submit.prompt_ids) - 1) if submit.cache_prompt else 0
            self._queried += len(submit.prompt_ids)
            self._hits += cached
            admitted.append((submit.sequence, cached))
        return admitted

    def _tokens(self, submit: Submit, start: int) -> Iterator[int]:
        script = self.script(submit) if callable(self.script) else self.script
        if submit.stop_ids:
            return itertools.islice(itertools.chain(script, itertools.repeat(submit.stop_ids[0])), start, None)
        return itertools.islice(itertools.cycle(script), start, None)

    def _extend(self, sequence: int, running: _Running) -> Token:
        token = next(running.tokens)
        running.length += 1
        submit = running.submit
        finish = None
        if token in submit.stop_ids:
            finish = "stop"
        elif running.length >= min(submit.max_tokens, self.max_context - len(submit.prompt_ids)):
            finish = "length"
        if submit.sampling.logprobs is None:
            return Token(sequence, token, finish)
        top = [(token + rank, -0.5 * (rank + 1)) for rank in range(submit.sampling.logprobs)]
        return Token(sequence, token, finish, -0.5, top)

    def _stats(self, tokens: int) -> StepStats:
        return StepStats(
            running=len(self._running),
            waiting=len(self._waiting),
            decode_rows=tokens,
            prefill_tokens=0,
            kv_blocks_used=self.blocks_used,
            kv_blocks_cached=0,
            kv_blocks=self.kv_blocks,
            preemptions_total=0,
            prefix_queries_total=self._queried,
            prefix_hits_total=self._hits,
            seconds=self.step_s,
        )

    def _end(self, reason: str) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._running.clear()
        self._waiting.clear()
        if not self._ended.done():
            self._ended.set_result(reason)
