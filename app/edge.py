"""What every request passes on its way in and out of a listener, whatever route it is for.

The request id, the key, the host name, the HTTP metrics, and the one place where an exception becomes an answer.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.access import header
from app.errors import (
    ApiError,
    BodyTooLarge,
    ContextLengthExceeded,
    InternalError,
    InvalidApiKey,
    MethodNotAllowed,
    NotFound,
)
from app.service import Service

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(rb"[A-Za-z0-9_-]{1,128}")
OTHER = ("other", "other")
"""Handler and method of everything that is no route: what a client invents makes no series."""
LINGER_S = 2.0

Guard = Callable[[Scope], None]


class Edge:
    """One listener's ASGI application: `routers` behind `guard`, which raises ApiError for who may not come in."""

    def __init__(self, routers: Sequence[APIRouter], guard: Guard, service: Service) -> None:
        self._app = FastAPI(
            openapi_url=None,
            redirect_slashes=False,
            exception_handlers={HTTPException: _no_route, Exception: _left_to_the_edge},
        )
        for router in routers:
            self._app.include_router(router)
        self._app.state.service = service
        self._guard = guard
        self._metrics = service.metrics
        self._handlers = set(handlers_of(routers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the listeners have neither lifespan nor websockets"
        exchange = _Exchange(scope, send)
        scope["state"] = {"request_id": exchange.request_id.decode()}
        try:
            self._guard(scope)
            await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            return  # before its request was whole
        except Exception as error:  # noqa: BLE001  # the last resort of a listener: log, answer 500, live on
            await self._answer(as_api_error(error, exchange.request_id), exchange, receive)
        finally:
            if exchange.status:
                self._metrics.http_request(*self._handler(scope), exchange.status, time.monotonic() - exchange.began)

    async def _answer(self, error: ApiError, exchange: "_Exchange", receive: Receive) -> None:
        if isinstance(error, InvalidApiKey):
            self._metrics.rejected("auth")
        elif isinstance(error, ContextLengthExceeded):
            self._metrics.rejected("context_length")
        if not exchange.status:  # else the connection is cut in the middle of the answer, and the client knows
            await send_error(error, receive, exchange.send)

    def _handler(self, scope: Scope) -> tuple[str, str]:
        path = scope["path"]
        handler = ("/v1/models/{id}" if path.startswith("/v1/models/") else path, scope["method"])
        return handler if handler in self._handlers else OTHER


class _Exchange:
    """One request and its answer: gives the answer its id, and remembers its status."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = header(scope, b"x-request-id")
        self.request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        self.began = time.monotonic()
        self.status = 0
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.request_id)]
        await self._send(message)


async def _no_route(request: Request, error: Exception) -> Response:
    """The framework's own refusals: 404 and 405."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        raise MethodNotAllowed((error.headers or {}).get("Allow", ""))
    raise NotFound


class _Nothing(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


async def _left_to_the_edge(request: Request, error: Exception) -> Response:
    """The framework raises the error again behind this, so that there is one place where it becomes an answer."""
    return _Nothing()


def handlers_of(routers: Sequence[APIRouter]) -> list[tuple[str, str]]:
    """(route template, method) of every route."""
    routes = [route for router in routers for route in router.routes]
    pairs = [(getattr(route, "path", ""), method) for route in routes for method in getattr(route, "methods", ())]
    return sorted((path.replace(":path}", "}"), method) for path, method in pairs)


def as_api_error(error: Exception, request_id: bytes) -> ApiError:
    """The error for the client; one that is our own fault goes to the log with its traceback."""
    if isinstance(error, ApiError):
        return error
    log.error("request=%s failed", request_id.decode(), exc_info=error)
    return InternalError()


async def send_error(error: ApiError, receive: Receive, send: Send) -> None:
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if isinstance(error, BodyTooLarge):
        await _linger(receive)
    await send({"type": "http.response.body"})


async def _linger(receive: Receive) -> None:
    """Throw away what the client is still sending for a moment: closing under it would destroy the answer."""
    try:
        async with asyncio.timeout(LINGER_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
