"""HTTP on a bound socket: uvicorn without its signals, lifespan and logs, so that two share one event loop."""

import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.errors import InvalidRequest
from app.sockets import BACKLOG
from app.streaming import ABORT

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers; the parser itself has no bound."""
KEEP_ALIVE_S = 75
"""Longer than proxies keep idle connections (60 s), so that they never send into one that we are closing."""

GRACE_S = 2
"""What is still being written when a listener closes gets so long."""


class Listener(uvicorn.Server):
    """Serves one application on one bound socket until `should_exit` is set."""

    def __init__(self, app: ASGIApp, bound: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            loop="none",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            backlog=BACKLOG,
        )
        super().__init__(config)
        self._bound = bound

    async def run_until_told(self) -> None:
        await self.serve(sockets=[self._bound])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the command's: there are two listeners and an engine to end in order."""
        yield


class _Protocol(HttpToolsProtocol):
    """Bounds the head of a request, gives what is no HTTP the same error object as everything else, lets it be cut."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, amount: int) -> None:
        self._head_bytes += amount
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("request head too large")  # the parser stops, and data_received answers 400

    def send_400_response(self, msg: str) -> None:
        body = InvalidRequest("This is not a valid HTTP request.", code="invalid_http").body()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {uuid.uuid4().hex}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
