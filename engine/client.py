"""The service's end of an engine: the contract, and the engine that is a child process.

An `EngineProcess` is one life of one engine, of one generation; its successor is another object. Nothing here is
shared between two of them, so that a successor may start while its predecessor still works.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from engine.build import build_id
from engine.carry_memory import CarryMemory
from engine.child import Child
from engine.config import EngineConfig
from engine.errors import EngineDied, EngineError, HandshakeError, LoadRefused, ModelFileError
from engine.framing import TO_SERVICE, FrameReader, encode
from engine.messages import (
    SCHEMA,
    Cancel,
    Checkpoint,
    Checkpointed,
    Failed,
    Grow,
    Heartbeat,
    Hello,
    Ledger,
    Load,
    LoadFailed,
    LoadProgress,
    Prepared,
    Ready,
    RungResult,
    Step,
    Stop,
    Submit,
    ToEngine,
    ToService,
    Trim,
    Trimmed,
    Welcome,
)

__all__ = ["CarryMemory", "EngineClient", "EngineEvents", "EngineLauncher", "EngineProcess"]

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 30.0
"""From spawn to Welcome; the child has imported next to nothing by then, but the machine may be busy."""

Answer = TypeVar("Answer")


class EngineEvents(Protocol):
    """What an engine tells its service, on the service's event loop. None of these may block or raise."""

    def on_progress(self, progress: LoadProgress) -> None: ...

    def on_step(self, step: Step) -> None: ...

    def on_failed(self, failed: Failed) -> None: ...

    def on_ledger(self, ledger: Ledger) -> None: ...

    def on_dead(self, reason: str) -> None:
        """The engine is gone, after `load` had returned and without `stop`; called once, after all it had sent."""


class EngineClient(Protocol):
    """One engine as the service sees it; EngineProcess and FakeEngine keep this contract.

    It lives `prepare`, `load`, requests, perhaps `checkpoint`, and then `stop` or its death.
    """

    @property
    def generation(self) -> int: ...

    @property
    def pid(self) -> int | None:
        """Of the process whose memory on a device is this engine's; None if it has none of its own."""

    async def prepare(self) -> None:
        """Start, import and parse, without touching a device; asked again, it says how that went. Errors as `load`."""

    async def load(self, config: EngineConfig, restore: bool) -> Ready:
        """Plan with the room there is now, load, and take over carried KV if `restore`.

        On any error and on cancellation nothing is left of the engine. Raises LoadRefused (bad file, no room),
        HandshakeError (another build), EngineDied (anything else).
        """

    async def abandon(self) -> None:
        """End by force what is not serving yet, told to nobody; returns when nothing is left of it."""

    def submit(self, submit: Submit) -> None:
        """Queue one sequence. Never blocks; has no effect on an engine that has died (`on_dead` follows)."""

    def cancel(self, sequences: list[int]) -> None:
        """End these sequences; each shows up in `Step.released`. Never blocks; ended and unknown ones are ignored."""

    async def trim(self, rung: str, device: int | None = None, keep_bytes: int | None = None) -> list[RungResult]:
        """Carry out one rung of the ladder between two steps. Raises EngineDied."""

    async def grow(self, device: int | None = None, bytes: int | None = None) -> list[RungResult]:
        """Take elastic memory again, up to `bytes` or to the plan. Raises EngineDied."""

    async def checkpoint(self, budget_bytes: int) -> Checkpointed:
        """Drain, copy at most so much KV for the successor, and run no step any more. Raises EngineDied.

        Every step that was run has been told by then.
        """

    async def stop(self, timeout_s: float) -> None:
        """End in order, by force after `timeout_s`; returns when nothing is left of it. `on_dead` is not called."""

    def kill(self) -> None:
        """End by force; `on_dead` follows."""

    async def wait(self) -> str:
        """Wait until nothing is left of it; the reason in words."""


class EngineProcess:
    """`python -m engine.worker` as a child, spoken to over a socket pair.

    Spawn it from the main thread: its parent-death signal is tied to the thread that started it.
    """

    def __init__(
        self,
        config: EngineConfig,
        generation: int,
        model_fd: int,
        events: EngineEvents,
        *,
        build: str,
        env: Mapping[str, str],
        carry_fd: int | None = None,
        command: tuple[str, ...] = ("-m", "engine.worker"),
    ) -> None:
        self.generation = generation
        self.heartbeat: Heartbeat | None = None
        self._hello = Hello(build, SCHEMA, generation, config, model_fd, carry_fd=carry_fd)
        self._events = events
        self._env = env
        self._command = command
        self._reader = FrameReader(TO_SERVICE, generation)
        self._child = Child(self)
        loop = asyncio.get_running_loop()
        self._prepared: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._gone: asyncio.Future[str] = loop.create_future()
        self._spawned = False
        self._successor = True
        self._welcomed = False
        self._serving = False
        self._stopping = False
        self._failure: EngineError | None = None
        self._requests = itertools.count(1)
        self._trims: dict[int, asyncio.Future[list[RungResult]]] = {}
        self._checkpointed: asyncio.Future[Checkpointed] | None = None

    @property
    def pid(self) -> int | None:
        return self._child.pid

    async def spawn(self, *, successor: bool) -> None:
        """Start the child; nobody waits for it yet. One that is no successor loads at once, which is a head start.

        Then `listen`, `prepare` and `load`, or `abandon`. Raises EngineDied when the process cannot be started.
        """
        self._spawned = True
        self._successor = successor
        if not successor:
            self._prepared.set_result(None)
        hello = msgspec.structs.replace(self._hello, successor=successor)
        descriptors = [fd for fd in (hello.model_fd, hello.carry_fd) if fd is not None]
        await self._child.start(self._command, self._env, descriptors)
        self.send(hello)
        self._handshake = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._miss_handshake)

    def listen(self, events: EngineEvents) -> None:
        """Whom to tell from now on."""
        self._events = events

    async def prepare(self) -> None:
        if not self._spawned:
            await self.spawn(successor=True)
        await self._or_abandon(self._prepared)

    async def load(self, config: EngineConfig, restore: bool) -> Ready:
        if self._successor:
            self.send(Load(config, restore))
        else:
            assert (config, restore) == (self._hello.config, False), "it has begun with something else"
        ready = await self._or_abandon(self._ready)
        if self._gone.done():
            raise EngineDied(self._gone.result())
        self._serving = True
        return ready

    async def start(self) -> Ready:
        """All from nothing to ready, for one that has no predecessor to wait for."""
        if not self._spawned:
            await self.spawn(successor=False)
        return await self.load(self._hello.config, False)

    async def abandon(self) -> None:
        """End by force what was spawned and will not be waited for."""
        for future in (self._prepared, self._ready):
            if not future.cancel() and not future.cancelled():
                future.exception()  # it failed by itself, and nobody else will ask
        if self.pid is not None:
            self.kill()
            await self.wait()

    def submit(self, submit: Submit) -> None:
        self.send(submit)

    def cancel(self, sequences: list[int]) -> None:
        self.send(Cancel(sequences))

    async def trim(self, rung: str, device: int | None = None, keep_bytes: int | None = None) -> list[RungResult]:
        request = next(self._requests)
        return await self._ask(request, Trim(request, rung, device, keep_bytes))

    async def grow(self, device: int | None = None, bytes: int | None = None) -> list[RungResult]:
        request = next(self._requests)
        return await self._ask(request, Grow(request, device, bytes))

    async def checkpoint(self, budget_bytes: int) -> Checkpointed:
        assert self._checkpointed is None, "an engine has one checkpoint, which ends its work"
        self._refuse_if_gone()
        self._checkpointed = asyncio.get_running_loop().create_future()
        self.send(Checkpoint(budget_bytes))
        return await self._checkpointed

    async def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self.send(Stop())
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            log.warning("engine pid=%s did not stop within %.1f s and is killed", self.pid, timeout_s)
            self.kill()
            await self.wait()

    def kill(self) -> None:
        self._child.kill()

    async def wait(self) -> str:
        return await asyncio.shield(self._gone)

    def send(self, message: ToEngine) -> None:
        """Queue one frame. The transport buffers without blocking; the scheduler bounds what is in flight."""
        self._child.write(encode(self.generation, message))

    async def _ask(self, request: int, message: ToEngine) -> list[RungResult]:
        self._refuse_if_gone()
        answer: asyncio.Future[list[RungResult]] = asyncio.get_running_loop().create_future()
        self._trims[request] = answer
        self.send(message)
        try:
            return await answer
        finally:
            del self._trims[request]

    def _refuse_if_gone(self) -> None:
        if self._gone.done():
            raise EngineDied(self._gone.result())

    async def _or_abandon(self, future: "asyncio.Future[Answer]") -> Answer:
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await self.abandon()
            raise

    # What the child says, and how it ends.

    def receive(self, data: bytes) -> None:
        """Bytes from the child's socket."""
        try:
            for message in self._reader.feed(data):
                if self._failure is None:
                    self._dispatch(message)
        except HandshakeError as error:
            self._fail(EngineDied(str(error)))

    def ended(self) -> None:
        """Nothing is left of the child: whoever waits for it hears of it, in its place."""
        self._handshake.cancel()
        reason = str(self._failure or self._child.obituary())
        self._gone.set_result(reason)
        died = self._failure or EngineDied(reason)
        for question in (*self._trims.values(), self._checkpointed):
            if isinstance(question, asyncio.Future) and not question.done():
                question.set_exception(died)
        if not self._ready.done():
            self._ready.set_exception(died)
            self._ready.exception()  # one that is being prepared is told of it by `prepare` alone
            if not self._prepared.done():
                self._prepared.set_exception(died)
        elif self._serving and not self._stopping:
            self._events.on_dead(reason)

    def _fail(self, error: EngineError) -> None:
        self._failure = self._failure or error
        self.kill()

    def _miss_handshake(self) -> None:
        if not self._welcomed:
            self._fail(EngineDied(f"the engine did not answer within {HANDSHAKE_TIMEOUT_S:.0f} s of its start"))

    def _dispatch(self, message: ToService) -> None:
        match message:
            case Step():
                self._events.on_step(message)
            case Heartbeat():
                self.heartbeat = message
            case Failed():
                self._events.on_failed(message)
            case Ledger():
                self._events.on_ledger(message)
            case Trimmed():
                _answer(self._trims.get(message.request), message.results)
            case Checkpointed():
                _answer(self._checkpointed, message)
            case Welcome():
                self._check(message)
            case Prepared():
                _answer(self._prepared, None)
            case LoadProgress():
                self._events.on_progress(message)
            case LoadFailed():
                self._fail(LoadRefused(message.kind, message.message))
            case Ready():
                _answer(self._ready, message)

    def _check(self, welcome: Welcome) -> None:
        self._welcomed = True
        theirs, ours = (welcome.build_id, welcome.schema), (self._hello.build_id, self._hello.schema)
        if theirs != ours:
            problem = (
                "Ullage's files were changed while this service was running (it is build "
                f"{ours[0]}/{ours[1]}, a new engine is {theirs[0]}/{theirs[1]}): restart the service"
            )
            self._fail(HandshakeError(problem))


def _answer(question: "asyncio.Future[Answer] | None", answer: Answer) -> None:
    """Unless whoever asked has given up by now."""
    if question is not None and not question.done():
        question.set_result(answer)


@dataclass(frozen=True)
class EngineLauncher:
    """Makes the engines of one service: same configuration, same open model file, same build, next generation."""

    config: EngineConfig
    model_fd: int
    carry: CarryMemory
    """In which KV is carried from one engine to the next; every engine inherits it."""
    env: Mapping[str, str]
    build: str = field(default_factory=build_id)

    @classmethod
    def open(cls, config: EngineConfig, env: Mapping[str, str], carry_mib: int | None = None) -> "EngineLauncher":
        """Open the model file once, for every engine to come. `env` is added to the children's environment.

        Raises ModelFileError when it cannot be opened.
        """
        try:
            # Non-blocking, so that a named pipe is refused by the reader and not waited for.
            model_fd = os.open(config.model_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            raise ModelFileError(config.model_path, "file", problem or "cannot be opened") from error
        return cls(config, model_fd, CarryMemory(carry_mib), env)

    def __call__(self, generation: int, events: EngineEvents) -> EngineProcess:
        carry_fd = self.carry.descriptor
        return EngineProcess(
            self.config, generation, self.model_fd, events, build=self.build, env=self.env, carry_fd=carry_fd
        )

    def close(self) -> None:
        os.close(self.model_fd)
        self.carry.close()
