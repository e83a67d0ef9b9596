"""The service's end of an engine: the contract, and the engine that is a child process.

An `EngineProcess` is one life of one engine, of one generation; its successor is another object. Nothing here is
shared between two of them, so that a successor may start while its predecessor still works.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.build import build_id
from engine.config import EngineConfig
from engine.errors import EngineDied, EngineError, HandshakeError, LoadRefused, ModelFileError
from engine.framing import TO_SERVICE, FrameReader, encode
from engine.messages import (
    SCHEMA,
    Cancel,
    Failed,
    Heartbeat,
    Hello,
    LoadFailed,
    LoadProgress,
    Ready,
    Step,
    Stop,
    Submit,
    ToEngine,
    ToService,
    Welcome,
)

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 30.0
"""From spawn to Welcome; the child has imported next to nothing by then, but the machine may be busy."""

EXIT_GRACE_S = 1.0
"""How long the rest of a dying engine (its process, its socket, its output) may lag behind the first sign of death."""

LINE_BYTES = 4096
"""A longer line of the child's output is cut, so that a child cannot make the service grow."""


class EngineEvents(Protocol):
    """What an engine tells its service, on the service's event loop. None of these may block or raise."""

    def on_progress(self, progress: LoadProgress) -> None: ...

    def on_step(self, step: Step) -> None: ...

    def on_failed(self, failed: Failed) -> None: ...

    def on_dead(self, reason: str) -> None:
        """The engine is gone, after `start` had returned and without `stop`; called once, after all it had sent."""


class EngineClient(Protocol):
    """One engine as the service sees it; EngineProcess and FakeEngine keep this contract."""

    @property
    def generation(self) -> int: ...

    async def start(self) -> Ready:
        """Start and load. On any error and on cancellation nothing is left of the engine.

        Raises LoadRefused (bad file, no room), HandshakeError (another build), EngineDied (anything else).
        """

    def submit(self, submit: Submit) -> None:
        """Queue one sequence. Never blocks; has no effect on an engine that has died (`on_dead` follows)."""

    def cancel(self, sequences: list[int]) -> None:
        """End these sequences; each shows up in `Step.released`. Never blocks; ended and unknown ones are ignored."""

    async def stop(self, timeout_s: float) -> None:
        """End in order, by force after `timeout_s`; returns when nothing is left of it. `on_dead` is not called."""

    def kill(self) -> None:
        """End by force; `on_dead` follows."""

    async def wait(self) -> str:
        """Wait for the end; the reason in words."""


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
        command: tuple[str, ...] = ("-m", "engine.worker"),
    ) -> None:
        self.generation = generation
        self.heartbeat: Heartbeat | None = None
        self._hello = Hello(build, SCHEMA, generation, config, model_fd)
        self._events = events
        self._env = env
        self._command = command
        self._reader = FrameReader(TO_SERVICE, generation)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: asyncio.Transport | None = None
        self._output: asyncio.ReadTransport | None = None
        self._alive = {"process", "socket", "output"}
        self._last_line = ""
        self._welcomed = False
        self._started = False
        self._stopping = False
        self._failure: EngineError | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def spawn(self) -> None:
        """The first half of `start`, for a head start: the child runs and loads, and nobody waits for it yet.

        Then `listen` and `start`, or `abandon`. Raises EngineDied when the process cannot be started.
        """
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._ended: asyncio.Future[str] = loop.create_future()
        await self._connect(loop)
        self.send(self._hello)
        self._handshake = loop.call_later(HANDSHAKE_TIMEOUT_S, self._miss_handshake)

    def listen(self, events: EngineEvents) -> None:
        """Whom to tell from now on."""
        self._events = events

    async def start(self) -> Ready:
        if self._process is None:
            await self.spawn()
        try:
            ready = await self._ready
        except asyncio.CancelledError:
            await self.abandon()
            raise
        finally:
            self._handshake.cancel()
        if self._ended.done():
            raise EngineDied(self._ended.result())
        self._started = True
        return ready

    async def abandon(self) -> None:
        """End by force what was spawned and will not be waited for."""
        self._handshake.cancel()
        if not self._ready.cancel() and not self._ready.cancelled():
            self._ready.exception()  # it failed by itself, and nobody else will ask
        self.kill()
        await self.wait()

    def submit(self, submit: Submit) -> None:
        self.send(submit)

    def cancel(self, sequences: list[int]) -> None:
        self.send(Cancel(sequences))

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
        if self._process is not None:
            self._process.kill()

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    def send(self, message: ToEngine) -> None:
        """Queue one frame. The transport buffers without blocking; the scheduler bounds what is in flight."""
        if self._socket is not None and not self._socket.is_closing():
            self._socket.write(encode(self.generation, message))

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        ours, theirs = socket.socketpair()
        read_fd, write_fd = os.pipe()
        output = os.fdopen(read_fd, "rb", buffering=0)
        try:
            self._output, _ = await loop.connect_read_pipe(lambda: _Output(self), output)
            self._socket, _ = await loop.create_unix_connection(lambda: _Frames(self), sock=ours)
            self._spawn(loop, theirs, write_fd)
        except BaseException as error:
            for resource in (self._socket or ours, self._output or output):
                resource.close()
            if isinstance(error, OSError):
                raise EngineDied(f"the engine process cannot be started: {error.strerror}") from error
            raise
        finally:
            theirs.close()
            os.close(write_fd)

    def _spawn(self, loop: asyncio.AbstractEventLoop, theirs: socket.socket, output_fd: int) -> None:
        assert threading.current_thread() is threading.main_thread(), "the engine must be spawned from the main thread"
        self._process = subprocess.Popen(
            [sys.executable, "-P", *self._command, "--socket-fd", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            pass_fds=(theirs.fileno(), self._hello.model_fd),
            env={**os.environ, **self._env},
            process_group=0,  # a Ctrl-C meant for the service must not reach a child that is not ready to ignore it
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._on_exit)

    # The death of a child has three signs, in any order: it can be reaped, its socket ends, its output ends. All are
    # awaited, so that nothing it sent is missed, but none for long: a grandchild may hold a copy of a descriptor.

    def _on_exit(self) -> None:
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self.lose("process")

    def lose(self, sign: str) -> None:
        """One of the three signs of death; the first starts the clock for the others, the last ends this engine."""
        if self._process is None:
            return
        if len(self._alive) == 3:
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._hasten)
        self._alive.discard(sign)
        if not self._alive:
            self._finish()

    def _hasten(self) -> None:
        self.kill()
        if "process" not in self._alive:
            assert self._socket is not None
            assert self._output is not None
            self._socket.abort()
            self._output.close()
        elif self._alive:
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._hasten)

    def _finish(self) -> None:
        reason = self._reason()
        self._ended.set_result(reason)
        if not self._ready.done():
            self._ready.set_exception(self._failure or EngineDied(reason))
        elif self._started and not self._stopping:
            self._events.on_dead(reason)

    def _reason(self) -> str:
        assert self._process is not None
        code = self._process.returncode
        if self._failure is not None:
            return str(self._failure)
        how = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with code {code}"
        tail = f": {self._last_line}" if code > 0 and self._last_line else ""
        return f"the engine (pid {self._process.pid}) {how}{tail}"

    def _fail(self, error: EngineError) -> None:
        self._failure = self._failure or error
        self.kill()

    def _miss_handshake(self) -> None:
        if not self._welcomed:
            self._fail(EngineDied(f"the engine did not answer within {HANDSHAKE_TIMEOUT_S:.0f} s of its start"))

    def receive(self, data: bytes) -> None:
        """Bytes from the child's socket."""
        try:
            for message in self._reader.feed(data):
                if self._failure is None:
                    self._dispatch(message)
        except HandshakeError as error:
            self._fail(EngineDied(str(error)))

    def _dispatch(self, message: ToService) -> None:
        if isinstance(message, Step):
            self._events.on_step(message)
        elif isinstance(message, Heartbeat):
            self.heartbeat = message
        elif isinstance(message, Failed):
            self._events.on_failed(message)
        elif isinstance(message, Welcome):
            self._check(message)
        elif isinstance(message, LoadProgress):
            self._events.on_progress(message)
        elif isinstance(message, LoadFailed):
            self._fail(LoadRefused(message.kind, message.message))
        elif not self._ready.done():
            self._ready.set_result(message)

    def _check(self, welcome: Welcome) -> None:
        self._welcomed = True
        theirs, ours = (welcome.build_id, welcome.schema), (self._hello.build_id, self._hello.schema)
        if theirs != ours:
            problem = (
                "Ullage's files were changed while this service was running (it is build "
                f"{ours[0]}/{ours[1]}, a new engine is {theirs[0]}/{theirs[1]}): restart the service"
            )
            self._fail(HandshakeError(problem))

    def log_line(self, line: bytes) -> None:
        """One line of the child's output."""
        text = line.decode(errors="replace").rstrip()
        if text:
            self._last_line = text
            log.warning("engine pid=%s: %s", self.pid, text)


class _Frames(asyncio.Protocol):
    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine

    def data_received(self, data: bytes) -> None:
        self._engine.receive(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.lose("socket")


class _Output(asyncio.Protocol):
    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._engine.log_line(line[:LINE_BYTES])
        self._rest = rest[:LINE_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.log_line(self._rest)
        self._engine.lose("output")


@dataclass(frozen=True)
class EngineLauncher:
    """Makes the engines of one service: same configuration, same open model file, same build, next generation."""

    config: EngineConfig
    model_fd: int
    env: Mapping[str, str]
    build: str = field(default_factory=build_id)

    @classmethod
    def open(cls, config: EngineConfig, env: Mapping[str, str]) -> "EngineLauncher":
        """Open the model file once, for every engine to come. `env` is added to the children's environment.

        Raises ModelFileError when it cannot be opened.
        """
        try:
            # Non-blocking, so that a named pipe is refused by the reader and not waited for.
            model_fd = os.open(config.model_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            raise ModelFileError(config.model_path, "file", problem or "cannot be opened") from error
        return cls(config, model_fd, env)

    def __call__(self, generation: int, events: EngineEvents) -> EngineProcess:
        return EngineProcess(self.config, generation, self.model_fd, events, build=self.build, env=self.env)

    def close(self) -> None:
        os.close(self.model_fd)
