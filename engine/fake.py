"""An engine without a model: the contract of `engine.client.EngineClient`, in the service's process, on its loop.

It schedules as the real one does as far as the service can tell: continuous batch up to `max_batch`, one Step message
a step, stop ids and limits, resume after `generated_ids`, cancellation, release after the end. The tokens come from a
script. It answers trims and checkpoints from a script too. It can be told to die, to hang, to outlive its SIGKILL, to
fail a sequence and to refuse to load, at any stage of its life.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from engine.client import EngineEvents
from engine.config import BLOCK_TOKENS, EngineConfig
from engine.errors import EngineDied, EngineError
from engine.messages import (
    Checkpointed,
    DeviceReady,
    Failed,
    LoadProgress,
    Ready,
    RungResult,
    Step,
    StepStats,
    Submit,
    Token,
)

Script = Callable[[Submit], Iterable[int]]
Stage = Literal["prepare", "load", "checkpoint", "stop"]


class Carry:
    """Stands for the memory in which KV is carried over; every engine of a service gets the same one."""

    def __init__(self) -> None:
        self.blocks = 0


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
    dies_in: Stage | None = None
    hangs_in: Stage | None = None
    unkillable: bool = False
    """A SIGKILL has no effect until `reap`, as when its driver is stuck in the kernel."""
    poison: int | None = None
    """The step in which a sequence with this id in its prompt would start kills the engine instead."""
    devices: Sequence[DeviceReady] = ()
    pid: int | None = None
    rungs: dict[str, RungResult] = field(default_factory=dict)
    """What a trim of each rung answers; one that is not here is a noop."""
    carry: Carry = field(default_factory=Carry)
    steps: int = 0
    trims: list[tuple[str, int | None, int | None]] = field(default_factory=list)
    """Every trim that was asked for: rung, device, bytes that may stay. A growth is `("grow", device, bytes)`."""
    config: EngineConfig | None = None
    """What it was told to load."""
    restored: int = 0
    _waiting: deque[Submit] = field(default_factory=deque)
    _running: dict[int, _Running] = field(default_factory=dict)
    _cancelled: list[int] = field(default_factory=list)
    _refusals: deque[str] = field(default_factory=deque)
    _next: asyncio.Handle | None = None
    _prepared: bool = False
    _serving: bool = False
    _stopping: bool = False
    _hung: bool = False
    _queried: int = 0
    _hits: int = 0

    def __post_init__(self) -> None:
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def prepare(self) -> None:
        await self._pass(None if self._prepared else "prepare")
        self._prepared = True

    async def load(self, config: EngineConfig, restore: bool) -> Ready:
        self.config = config
        self.events.on_progress(LoadProgress("weights", 0, 1))
        await self._pass("load")
        if self.load_error is not None:
            self._ended.set_result(str(self.load_error))
            raise self.load_error
        self.events.on_progress(LoadProgress("warmup", 0, 1))
        await self._pass(None)
        self._serving = True
        self.restored = self.carry.blocks if restore else 0
        return Ready(
            device="fake",
            max_context=self.max_context,
            max_batch=self.max_batch,
            kv_dtype="f32",
            kv_blocks=self.kv_blocks,
            kv_bytes=0,
            weight_bytes=0,
            load_seconds=0.0,
            devices=list(self.devices),
            restored_blocks=self.restored,
        )

    async def start(self) -> Ready:
        await self.prepare()
        return await self.load(EngineConfig(model_path="fake"), restore=False)

    async def abandon(self) -> None:
        if not self.unkillable:
            self._end("given up")
        await self.wait()

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

    async def trim(self, rung: str, device: int | None = None, keep_bytes: int | None = None) -> list[RungResult]:
        self.trims.append((rung, device, keep_bytes))
        await self._pass(None)
        return [self.rungs.get(rung) or RungResult(rung, device or 0, "noop", 0, 0.0)]

    async def grow(self, device: int | None = None, bytes: int | None = None) -> list[RungResult]:
        self.trims.append(("grow", device, bytes))
        await self._pass(None)
        return [self.rungs.get("grow") or RungResult("elastic", device or 0, "noop", 0, 0.0)]

    async def checkpoint(self, budget_bytes: int) -> Checkpointed:
        """A step that had been launched is still told; after that there is none."""
        await self._pass("checkpoint")
        self.carry.blocks = self.blocks_used if budget_bytes else 0
        self._rest()
        return Checkpointed(self.carry.blocks, self.carry.blocks, 0.0)

    async def stop(self, timeout_s: float) -> None:
        self._stopping = True
        if self.hangs_in == "stop" and not self._ended.done():
            await asyncio.wait([self._ended], timeout=timeout_s)
            self.kill()
        elif not self.unkillable:
            self._end("stopped")
        await self.wait()

    def kill(self) -> None:
        if not self.unkillable:
            self.die("killed")

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    # What a test may do to it.

    def die(self, reason: str = "the fake engine was told to die") -> None:
        """End as a process does: nothing more is sent, and `on_dead` follows on a later turn of the loop."""
        if not self._ended.done():
            self._end(reason)
            if self._serving and not self._stopping:
                asyncio.get_running_loop().call_soon(self.events.on_dead, reason)

    def reap(self) -> None:
        """The SIGKILL of an unkillable one works at last."""
        self.unkillable = False
        self.kill()

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

    async def _pass(self, stage: Stage | None) -> None:
        """A turn of the loop, as any answer takes; the one in which it dies or hangs if it was told to."""
        try:
            await asyncio.sleep(0)
            if stage is not None and stage == self.dies_in:
                self.die(f"the fake engine was told to die in {stage}")
            if self._hung or (stage is not None and stage == self.hangs_in):
                await self.wait()
        except asyncio.CancelledError:
            if not self._serving:
                self._end("given up")
            raise
        if self._ended.done():
            raise EngineDied(self._ended.result())

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
        if self._poisoned():
            self.die("poisoned")
            return
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

    def _poisoned(self) -> bool:
        return self.poison is not None and any(self.poison in r.submit.prompt_ids for r in self._running.values())

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

    def _rest(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._hung = True

    def _end(self, reason: str) -> None:
        self._rest()
        self._running.clear()
        self._waiting.clear()
        if not self._ended.done():
            self._ended.set_result(reason)
