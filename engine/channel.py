"""The engine's end of the socket pair: drained by the engine thread between steps, shared for sending.

The engine never waits for ever on its service. A service that has died is seen as end of file or a broken pipe, one
that lives but reads nothing for `stall_s` is taken for lost; both raise ServiceGone.
"""

import select
import socket
import threading

from engine.errors import ServiceGone
from engine.framing import TO_ENGINE, FrameReader, encode
from engine.messages import ToEngine, ToService

SEND_STALL_S = 60.0
"""A stopped service (a debugger, a suspended container) is waited for this long; its records outlive the engine."""

_RECEIVE_BYTES = 1 << 20


class Channel:
    """Inbox and outbox of one engine process over a connected stream socket, for one generation."""

    def __init__(self, sock: socket.socket, generation: int, stall_s: float = SEND_STALL_S) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._generation = generation
        self._stall_ms = stall_s * 1e3
        self._reader = FrameReader(TO_ENGINE, generation)
        self._send_lock = threading.Lock()
        self._readable = _poller(sock, select.POLLIN)
        self._writable = _poller(sock, select.POLLOUT)

    def poll(self, timeout: float | None) -> list[ToEngine]:
        """Messages that have arrived; waits up to `timeout` seconds (None: for ever) while there is none.

        Raises ServiceGone at end of file, HandshakeError when the service breaks the protocol.
        """
        while True:
            if timeout != 0:
                self._readable.poll(None if timeout is None else timeout * 1e3)
            messages = self._receive()
            if messages or timeout is not None:
                return messages

    def send(self, message: ToService) -> None:
        """Send one frame whole. Raises ServiceGone when the service is dead or has stalled."""
        frame = encode(self._generation, message)
        with self._send_lock:
            self._write(memoryview(frame))

    def try_send(self, message: ToService) -> bool:
        """Send one small frame unless that would mean waiting; False when it was not sent. Raises ServiceGone."""
        frame = encode(self._generation, message)
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            # Linux calls a stream socket writable while most of its buffer is free: a small frame goes out whole.
            if not self._writable.poll(0):
                return False
            self._write(memoryview(frame))
        finally:
            self._send_lock.release()
        return True

    def _write(self, frame: memoryview) -> None:
        while frame:
            try:
                frame = frame[self._socket.send(frame) :]
            except BlockingIOError:
                if not self._writable.poll(self._stall_ms):
                    raise ServiceGone(f"the service has read nothing for {self._stall_ms / 1e3:.0f} s") from None
            except OSError as error:
                raise ServiceGone(f"the service is gone: {error.strerror}") from error

    def _receive(self) -> list[ToEngine]:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ServiceGone(f"the service is gone: {error.strerror}") from error
        if not data:
            raise ServiceGone("the service closed the connection")
        return self._reader.feed(data)


def _poller(sock: socket.socket, event: int) -> select.poll:
    poller = select.poll()
    poller.register(sock, event)
    return poller
