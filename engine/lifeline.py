"""How an engine process is tied to its service: it never outlives it, dies first when memory runs out, and beats."""

import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

from engine.channel import Channel
from engine.errors import ServiceGone
from engine.messages import Heartbeat

HEARTBEAT_S = 1.0
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 500
"""Half of all memory added to what the kernel counts for us: it takes the engine long before the service."""


def die_with_service(sock: socket.socket) -> None:
    """Have the kernel kill this process when the service's main thread ends. Raises ServiceGone if it has already.

    The one at the other end of the socket pair made it, so its process id tells whether our parent is still it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    service_pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if os.getppid() != service_pid:
        raise ServiceGone("the service ended before its engine had begun")


def volunteer_for_the_oom_killer(proc: Path = Path("/proc/self")) -> None:
    """Raise our own out-of-memory score, which needs no privilege; said and left where the system forbids it."""
    score = proc / "oom_score_adj"
    try:
        score.write_text(str(max(_OOM_SCORE, int(score.read_text()))))
    except OSError as error:
        sys.stderr.write(f"{score} cannot be raised ({error.strerror}): out of memory may hit the service first\n")


class WatchedLoop(Protocol):
    """What the heart looks at from its thread; engine.loop.EngineLoop has it."""

    steps: int
    turn_began: float | None


class Heart(threading.Thread):
    """The engine's second thread: says every second that the process lives and how long its step has run.

    While the engine thread is deep in a step it is also the one to notice that nobody is left to work for.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(name="heart", daemon=True)
        self._channel = channel
        self._began = time.monotonic()
        self._loop: WatchedLoop | None = None

    def watch(self, loop: WatchedLoop) -> None:
        """From now on beat for this loop; until then the engine is loading."""
        self._loop = loop

    def run(self) -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            try:
                self._channel.try_send(self.beat(time.monotonic()))
            except ServiceGone as error:
                sys.stderr.write(f"{error}\n")
                os._exit(1)

    def beat(self, now: float) -> Heartbeat:
        loop = self._loop
        if loop is None:
            return Heartbeat(0, True, now - self._began)
        began = loop.turn_began
        return Heartbeat(loop.steps, began is not None, 0.0 if began is None else now - began)
