"""From a generation to HTTP: the answer as one body, or as server-sent events while it grows.

Both are ASGI applications that own their generation: however they end, it is given up. What goes wrong before the
first byte is raised (the application makes an HTTP status of it), what goes wrong after it becomes an SSE error event.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.answers import Answer, Transcript, usage_of
from app.errors import ApiError, RequestTimedOut
from app.generation import Generation

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
ABORT = "ullage.abort"
"""The listener's extension of the scope; its `call` drops the connection."""
COMMENT = b": keep-alive\n\n"
KEEPALIVE_S = 15.0
LAST_WORD_S = 10.0
"""How long a stream that has failed waits for a client that does not read, before the connection is cut."""


@dataclass(frozen=True)
class Delivery:
    """How answers are delivered, from the settings."""

    request_timeout_s: float
    keepalive: Literal["comment", "chunk", "off"]
    keepalive_s: float = KEEPALIVE_S


class _Delivered(Response):
    """An admitted generation on its way to its client; the head is written by the subclass, once there is one."""

    def __init__(self, generation: Generation, answer: Answer, per_prompt: int, delivery: Delivery) -> None:
        super().__init__()
        self._generation = generation
        self._answer = answer
        self._per_prompt = per_prompt
        self._delivery = delivery


class PlainResponse(_Delivered):
    """The answer as one JSON object, once it is complete."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        transcripts = [Transcript() for _ in generation.choices]
        async with attended(generation, receive, self._delivery.request_timeout_s):
            await generation.admitted()
            async for events in generation.events():
                for event in events:
                    transcripts[event.index].add(event)
        if any(transcript.finish is None for transcript in transcripts):
            return  # the client is gone
        body = self._answer.whole(transcripts, usage_of(generation.choices, self._per_prompt))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class StreamResponse(_Delivered):
    """The answer as server-sent events: one write for everything that is new at a wake-up."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        async with attended(generation, receive, self._delivery.request_timeout_s):
            await generation.admitted()
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            try:
                async with asyncio.timeout(self._delivery.request_timeout_s + LAST_WORD_S):
                    await self._write(send)
            except ApiError as error:
                await _last_word(scope, send, b"data: %b\n\n" % error.body())
            except TimeoutError:
                cut(scope)  # its time was over long ago, and the client has read nothing since

    async def _write(self, send: Send) -> None:
        answer, generation = self._answer, self._generation
        idle_s = None if self._delivery.keepalive == "off" else self._delivery.keepalive_s
        await send({"type": "http.response.body", "body": answer.opening(), "more_body": True})
        async for events in generation.events(idle_s):
            body = answer.chunks(events) if events else self._silence()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send(
            {"type": "http.response.body", "body": answer.closing(usage_of(generation.choices, self._per_prompt))}
        )

    def _silence(self) -> bytes:
        """What is sent when nothing happens: no choice may speak again after its end."""
        if self._delivery.keepalive == "comment":
            return COMMENT
        running = [record.index for record in self._generation.choices if record.outcome is None]
        return self._answer.silence(running[0]) if running else COMMENT


@asynccontextmanager
async def attended(generation: Generation, receive: Receive, limit_s: float) -> AsyncIterator[None]:
    """Give the generation up when the client leaves, when its time is over, and at the latest on leaving."""
    timer = asyncio.get_running_loop().call_later(limit_s, generation.fail, RequestTimedOut(limit_s))
    watch = asyncio.create_task(_cancel_when_gone(generation, receive))
    try:
        yield
    finally:
        timer.cancel()
        watch.cancel()
        generation.cancel()


async def _cancel_when_gone(generation: Generation, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.cancel()


async def _last_word(scope: Scope, send: Send, event: bytes) -> None:
    """An error event and the end, unless the client has stopped reading: then the connection is cut."""
    try:
        async with asyncio.timeout(LAST_WORD_S):
            await send({"type": "http.response.body", "body": event})
    except TimeoutError:
        cut(scope)


def cut(scope: Scope) -> None:
    """Drop the connection and what is buffered for it; to close it would wait for the client to read that."""
    scope["extensions"][ABORT]["call"]()
