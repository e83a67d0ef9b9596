"""A client of bare sockets, for what well-behaved libraries do not show."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    return socket.create_connection((address.hostname, address.port), timeout=10)


def post(path: str, body: Any, **headers: str) -> bytes:
    """The bytes of a request."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(raw)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


class Answers:
    """Reads answers off one connection, one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")
        self.headers: dict[str, str] = {}

    def head(self) -> int:
        """Read status line and headers; returns the status."""
        status = int(self._file.readline().split()[1])
        self.headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(":")
            self.headers[name.lower()] = value.strip()
        return status

    def chunks(self) -> Iterator[bytes]:
        """The chunks of a chunked body, as they were written."""
        while size := int(self._file.readline(), 16):
            yield self._file.read(size)
            assert self._file.readline() == b"\r\n"
        assert self._file.readline() == b"\r\n"

    def body(self) -> bytes:
        if "content-length" in self.headers:
            return self._file.read(int(self.headers["content-length"]))
        return b"".join(self.chunks())

    def at_end(self) -> bool:
        """The other side has closed."""
        return self._file.read(1) == b""


def events(body: bytes) -> list[Any]:
    """The data of each server-sent event; comments are left out, `[DONE]` stays text."""
    found = []
    for block in body.decode().split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found
