"""Tokens a second over HTTP: the whole service with the fake engine, 32 streams, a raw-socket load generator.

Detokenizing and four stop strings are included; nothing of a model is. The generator is this process, the service
another one, so both share the machine's cores.
"""

import json
import selectors
import socket
import subprocess
import sys
import time
from typing import Any
from urllib.parse import urlsplit

STREAMS = 32
TOKENS = 4_000
ROUNDS = 3
STOPS = ["\n\nUser:", "<|end|>", "### ", "STOP"]
END = b"data: [DONE]\n\n"


class Stream:
    """One client: sends a request, takes the events as they come, and keeps the usage of the last one."""

    def __init__(self, host: str, port: int, body: bytes) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)
        self.socket.setblocking(False)
        self.events = 0
        self.first_at = 0.0
        self._tail = b""

    def read(self) -> bool:
        """Take what is there; True at the end of the stream."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the service closed a stream before its end")
        if not self.first_at:
            self.first_at = time.perf_counter()
        self.events += data.count(b"data: ")
        self._tail = (self._tail + data)[-2048:]
        return END in self._tail[-64:]

    def completion_tokens(self) -> int:
        usage = self._tail[self._tail.rindex(b'"usage":') + len(b'"usage":') : self._tail.rindex(b"}\n\ndata: [DONE]")]
        return int(json.loads(usage)["completion_tokens"])


def load(host: str, port: int, streams: int = STREAMS, tokens: int = TOKENS) -> dict[str, Any]:
    """One round: all streams at once, until the last has ended."""
    body = json.dumps(
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": "Tell me everything."}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": tokens,
            "stop": STOPS,
            "temperature": 0.7,
        }
    ).encode()
    began = time.perf_counter()
    clients = [Stream(host, port, body) for _ in range(streams)]
    selector = selectors.DefaultSelector()
    for client in clients:
        selector.register(client.socket, selectors.EVENT_READ, client)
    open_streams = streams
    while open_streams:
        for key, _ in selector.select():
            client = key.data
            if client.read():
                selector.unregister(client.socket)
                client.socket.close()
                open_streams -= 1
    seconds = time.perf_counter() - began
    received = sum(client.completion_tokens() for client in clients)
    assert received == streams * tokens, f"{received} tokens instead of {streams * tokens}"
    events = sum(client.events for client in clients)
    return {"tokens_per_second": received / seconds, "events_per_second": events / seconds, "seconds": seconds}


def run() -> dict[str, Any]:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "benchmarks.scripted_service"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as service:
        assert service.stdout is not None
        address = urlsplit(service.stdout.readline().decode().strip())
        assert address.hostname is not None
        assert address.port is not None
        rounds = [load(address.hostname, address.port) for _ in range(ROUNDS)]
        assert service.stdin is not None
        service.stdin.close()
    best = max(rounds, key=lambda figures: float(figures["tokens_per_second"]))
    sys.stdout.write("streams  tokens each   tokens/s   events/s\n")
    for figures in rounds:
        sys.stdout.write(
            f"{STREAMS:7d}  {TOKENS:11d}  {figures['tokens_per_second']:9,.0f}  {figures['events_per_second']:9,.0f}\n"
        )
    return {"streams": STREAMS, "tokens_each": TOKENS, **best}
