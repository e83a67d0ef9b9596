"""The engine's real loop, scheduler and block accounting, in this process and on the event loop.

Its pipeline is scripted: each token follows from the state that was really kept for its sequence. So a request that is
resumed with a wrong record, or reads a block that is not its own, gets another text, and the books can be audited.
"""

import asyncio
from collections.abc import Callable

from engine.client import EngineEvents
from engine.errors import EngineDied
from engine.framing import TO_ENGINE, TO_SERVICE, FrameReader, encode
from engine.kv_cache.blocks import BlockPool
from engine.loop import EngineLoop
from engine.messages import Cancel, Failed, Ready, Step, Submit, ToEngine, ToService
from engine.scheduler import Scheduler
from tests.engine.scripted import ScriptedPipeline

BLOCK_TOKENS = 4


class LoopEngine:
    """Keeps the contract of EngineClient. Messages go through their frames, so nothing is shared by accident."""

    def __init__(self, generation: int, events: EngineEvents, *, max_batch: int = 4, n_blocks: int = 64) -> None:
        self.generation = generation
        self._events = events
        self._max_batch = max_batch
        self._in = FrameReader(TO_ENGINE, generation)
        self._out = FrameReader(TO_SERVICE, generation)
        self._inbox: list[ToEngine] = []
        self._outbox: list[ToService] = []
        self._turn_due = False
        self._alive = True
        self._cancelled_at: dict[int, int] = {}
        self.steps_to_release: dict[int, int] = {}
        """For each cancelled sequence, how many steps were collected until its blocks were back."""
        self.serving = False
        self.pool = BlockPool(n_blocks, block_tokens=BLOCK_TOKENS)
        self.scheduler = Scheduler(self.pool, max_batch, max_context=200, prefill_chunk=3, prefill_chunk_idle=8)
        self._loop = EngineLoop(ScriptedPipeline(BLOCK_TOKENS), self.scheduler, self, self)

    async def start(self) -> Ready:
        await asyncio.sleep(0)
        if not self._alive:
            raise EngineDied("killed while loading")
        self.serving = True
        for _ in range(3):  # between the arrival of Ready and the one who waits for it an engine may die too
            await asyncio.sleep(0)
        return Ready("test", 200, self._max_batch, "f32", self.pool.n_blocks, 0, 0, 0.0)

    def submit(self, submit: Submit) -> None:
        self._receive(submit)

    def cancel(self, sequences: list[int]) -> None:
        self._cancelled_at.update(dict.fromkeys(sequences, self._loop.steps))
        self._receive(Cancel(sequences))

    def fail(self, sequence: int) -> None:
        """As if the pipeline had found that one sequence cannot go on."""
        found = self.scheduler._by_id.get(sequence)
        if self._alive and found is not None:
            self.scheduler.fail(found, "poison", "told to fail")
            self._wake()

    async def stop(self, timeout_s: float) -> None:
        self._alive = False

    def kill(self) -> None:
        if self._alive:
            self._alive = False
            if self.serving:
                asyncio.get_running_loop().call_soon(self._events.on_dead, "killed")

    async def wait(self) -> str:
        return "killed"

    @property
    def idle(self) -> bool:
        return not self._alive or (self.scheduler.idle and not self._inbox and not self._turn_due)

    # Inbox and outbox of the loop.

    def poll(self, timeout: float | None) -> list[ToEngine]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, message: ToService) -> None:
        self._outbox += self._out.feed(encode(self.generation, message))

    def _receive(self, message: ToEngine) -> None:
        if self._alive:
            self._inbox += self._in.feed(encode(self.generation, message))
            self._wake()

    def _wake(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """One turn of the engine; what it sent arrives on the turn of the event loop after it."""
        self._turn_due = False
        if not self._alive:
            return
        self._loop.step()
        self.pool.audit(sequence.blocks for sequence in self.scheduler.holding())
        messages, self._outbox = self._outbox, []
        asyncio.get_running_loop().call_soon(self._deliver, messages)
        if not self.scheduler.idle:
            self._wake()

    def _deliver(self, messages: list[ToService]) -> None:
        for message in messages:
            if not self._alive:
                return  # torn off by the death
            if isinstance(message, Step):
                for sequence in self._cancelled_at.keys() & message.released:
                    self.steps_to_release[sequence] = message.step - self._cancelled_at[sequence]
                self._events.on_step(message)
            else:
                assert isinstance(message, Failed)
                self._events.on_failed(message)


LoopEngineFactory = Callable[[int, EngineEvents], LoopEngine]
