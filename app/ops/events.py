"""GET /admin/events: as a list, and to whoever accepts text/event-stream as a stream of what happens from now on.

Each event of the stream has its `seq` as id, so that a browser that lost the connection says where it was
(Last-Event-ID) and gets what it missed, as far as that is still in memory. `?after=SEQ` is the same for others.
"""

import asyncio

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.errors import InvalidRequest
from app.events import Events
from app.service import service_of
from app.streaming import COMMENT, STREAM_HEADERS

router = APIRouter()

KEEPALIVE_S = 15.0


@router.get("/admin/events", response_model=None)
async def events(request: Request) -> Response:
    service = service_of(request)
    after = _after(request)
    if "text/event-stream" in request.headers.get("accept", ""):
        return EventStream(service.events, service.events.last_seq if after is None else after)
    body = msgspec.json.encode({"events": service.events.since(after or 0)})
    return Response(body, media_type="application/json")


def _after(request: Request) -> int | None:
    """The last event that whoever asks has seen."""
    given = request.query_params.get("after", request.headers.get("last-event-id"))
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 16):
        raise InvalidRequest("after: expected the seq of an event.", param="after")
    return int(given)


class EventStream(Response):
    """Server-sent events after `seq`, until the client goes or the service ends."""

    def __init__(self, events: Events, seq: int) -> None:
        super().__init__()
        self._events = events
        self._seq = seq

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send), name="event stream")
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait([writing, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.wait([writing, leaving])
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        body = COMMENT
        while True:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._events.last_seq <= self._seq and not self._events.ended:
                await self._events.news(KEEPALIVE_S)
            if self._events.ended:
                await send({"type": "http.response.body", "body": b""})
                return
            body = self._news() or COMMENT

    def _news(self) -> bytes:
        found = self._events.since(self._seq)
        if found:
            self._seq = found[-1].seq
        return b"".join(b"id: %d\ndata: %b\n\n" % (event.seq, msgspec.json.encode(event)) for event in found)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
