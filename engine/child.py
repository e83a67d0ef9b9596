"""A child process with a socket and an output: how it is started, and how its death is known.

It knows nothing of what is said over the socket; `engine.client` does.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.errors import EngineDied

log = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0
"""How long the rest of a dying engine (its process, its socket, its output) may lag behind the first sign of death."""

LINE_BYTES = 4096
"""A longer line of the child's output is cut, so that a child cannot make the service grow."""


class Owner(Protocol):
    """Whom a child belongs to; called on the event loop."""

    def receive(self, data: bytes) -> None:
        """Bytes from the child's socket."""

    def ended(self) -> None:
        """Nothing is left of the child, and everything that it sent has been received. Called once."""


class Child:
    """`python -P COMMAND --socket-fd N`, with its end of a socket pair, and its output in our log.

    Its death has three signs, in any order: it can be reaped, its socket ends, its output ends. All are awaited, so
    that nothing it sent is missed, but none for long: a grandchild may hold a copy of a descriptor.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: asyncio.Transport | None = None
        self._output: asyncio.ReadTransport | None = None
        self._alive = {"process", "socket", "output"}
        self._last_line = ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, command: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]) -> None:
        """`env` is added to our environment, `descriptors` are inherited. Raises EngineDied when it cannot be started.

        To be called from the main thread: the child's parent-death signal is tied to the thread that started it.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        read_fd, write_fd = os.pipe()
        output = os.fdopen(read_fd, "rb", buffering=0)
        try:
            self._output, _ = await loop.connect_read_pipe(lambda: _Output(self), output)
            self._socket, _ = await loop.create_unix_connection(lambda: _Bytes(self), sock=ours)
            self._spawn(loop, command, env, descriptors, theirs, write_fd)
        except BaseException as error:
            for resource in (self._socket or ours, self._output or output):
                resource.close()
            if isinstance(error, OSError):
                raise EngineDied(f"the engine process cannot be started: {error.strerror}") from error
            raise
        finally:
            theirs.close()
            os.close(write_fd)

    def write(self, data: bytes | bytearray) -> None:
        """Never blocks: what the child does not take is buffered. Has no effect on one that is gone."""
        if self._socket is not None and not self._socket.is_closing():
            self._socket.write(data)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def obituary(self) -> str:
        """How it ended, in words; to be asked once it has."""
        assert self._process is not None
        code = self._process.returncode
        how = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with code {code}"
        tail = f": {self._last_line}" if code > 0 and self._last_line else ""
        return f"the engine (pid {self._process.pid}) {how}{tail}"

    def _spawn(
        self,
        loop: asyncio.AbstractEventLoop,
        command: Sequence[str],
        env: Mapping[str, str],
        descriptors: Sequence[int],
        theirs: socket.socket,
        output_fd: int,
    ) -> None:
        assert threading.current_thread() is threading.main_thread(), "the engine must be spawned from the main thread"
        self._process = subprocess.Popen(
            [sys.executable, "-P", *command, "--socket-fd", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            pass_fds=(theirs.fileno(), *descriptors),
            env={**os.environ, **env},
            process_group=0,  # a Ctrl-C meant for the service must not reach a child that is not ready to ignore it
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self.lose("process")

    def lose(self, sign: str) -> None:
        """One of the three signs of death; the first starts the clock for the others, the last ends this child."""
        if self._process is None:
            return
        if len(self._alive) == 3:
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._hasten)
        self._alive.discard(sign)
        if not self._alive:
            self._owner.ended()

    def _hasten(self) -> None:
        self.kill()
        if "process" not in self._alive:
            assert self._socket is not None
            assert self._output is not None
            self._socket.abort()
            self._output.close()
        elif self._alive:
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._hasten)

    def received(self, data: bytes) -> None:
        self._owner.receive(data)

    def log_line(self, line: bytes) -> None:
        """One line of the child's output."""
        text = line.decode(errors="replace").rstrip()
        if text:
            self._last_line = text
            log.warning("engine pid=%s: %s", self.pid, text)


class _Bytes(asyncio.Protocol):
    def __init__(self, child: Child) -> None:
        self._child = child

    def data_received(self, data: bytes) -> None:
        self._child.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._child.lose("socket")


class _Output(asyncio.Protocol):
    def __init__(self, child: Child) -> None:
        self._child = child
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._child.log_line(line[:LINE_BYTES])
        self._rest = rest[:LINE_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        self._child.log_line(self._rest)
        self._child.lose("output")
