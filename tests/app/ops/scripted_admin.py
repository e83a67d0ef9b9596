"""The status page over an admin API that says what a test wants it to: every state of a device, at once.

It has the shapes of the real one (test_page_whole.py holds them against it) and a cookie; what it is asked to do is
written down.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.listeners import Listener
from app.ops import page
from app.sockets import bind, url

KEY = "the-admin-key"
MIB = 1 << 20
GIB = 1 << 30


def device(number: int, **changes: Any) -> dict[str, Any]:
    """A device of the motivating report, well but for `changes`."""
    ledger = {"context": 402 * MIB, "modules": 66 * MIB, "weights": 9400 * MIB, "kv_cache": 5120 * MIB, "shadow": 0}
    ledger |= {"scratch": 310 * MIB, "cublas_workspace": 32 * MIB, "cuda_graphs": 61 * MIB, "pool_cached": 0}
    ledger |= {"unaccounted": 6 * MIB}
    own = sum(ledger.values())
    total, reserved = 16 * GIB, 303 * MIB
    free = 272 * MIB
    made = {
        "device": number,
        "uuid": f"GPU-0000000{number}",
        "name": "NVIDIA GeForce RTX 5060 Ti",
        "stages": [number],
        "total": total,
        "free": free,
        "used": total - free - reserved,
        "reserved": reserved,
        "own": own,
        "other": total - free - reserved - own,
        "own_source": "nvml",
        "source": "nvml",
        "age_seconds": 0.4,
        "error": None,
        "idle_free": free,
        "baseline_free": 330 * MIB,
        "floors": {"warn": 198 * MIB, "trim": 148 * MIB, "reload": 82 * MIB},
        "ledger": ledger,
        "drift": None,
        "state": "ok",
        "reason": "idle free memory is above its floors",
        "tight": False,
        "trend": {
            "class": "first_use",
            "bytes_per_request": 0.0,
            "bytes_per_1k_prompt_tokens": 0.0,
            "bytes_per_second": 0.0,
            "confidence": 0.0,
            "forecast_seconds": None,
            "forecast_requests": None,
        },
    }
    trend = made["trend"] | changes.pop("trend", {})
    return made | changes | {"trend": trend}


def losing(number: int, **changes: Any) -> dict[str, Any]:
    """The later device of the report, after its 19th request."""
    shrinking = {
        "class": "growth",
        "bytes_per_request": 3.9 * MIB,
        "bytes_per_1k_prompt_tokens": 35_600.0,
        "bytes_per_second": 3.9 * MIB / 90,
        "confidence": 0.87,
        "forecast_seconds": 780.0,
        "forecast_requests": 8.7,
    }
    figures = {"free": 94 * MIB, "idle_free": 98 * MIB, "baseline_free": 204 * MIB, "state": "drain"}
    figures["floors"] = {"warn": 122 * MIB, "trim": 92 * MIB, "reload": 64 * MIB}
    figures["reason"] = "a reload is set for the next idle moment; reload floor in 9 requests, 13 minutes"
    return device(number, **figures | {"trend": shrinking} | changes)


def vram(*devices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    reload = {"in_progress": False, "phase": None, "generation": 2, "reason": None, "started_at": None, "last": None}
    last = {"reason": "vram_growth", "result": "ok", "seconds": 1.284, "phases": {"drain": 0.02, "load": 1.1}}
    return {
        "devices": list(devices),
        "engine": "ready",
        "reload": reload | {"last": last, "budget_left": 1},
        "queue": {"running": 3, "waiting": 1, "held": 0, "lost": 0},
        "watchdog": {"mode": "on", "until": None},
        "model": "Qwen3.8-Flash-Next-IQ3_S",
        "version": "0.1.0",
    } | changes


def event(seq: int, **changes: Any) -> dict[str, Any]:
    made = {"seq": seq, "time": stamp(seq * 90), "device": 1, "kind": "state", "class": "growth", "state": "watch"}
    return made | {"rung": None, "reason": "free memory shrinks", "returned_bytes": None} | changes


def request_row(number: int, free: list[int | None], change: list[int | None]) -> dict[str, Any]:
    devices = [
        {
            "device": at,
            "idle_free_before": None if after is None or lost is None else after - lost,
            "idle_free_after": after,
            "change": lost,
            "change_by_owner": None if lost is None else {"unaccounted": -lost, "kv_cache": 0},
        }
        for at, (after, lost) in enumerate(zip(free, change, strict=True))
    ]
    row = {"id": f"req-{number:04}", "finished_at": stamp(number * 90), "prompt_tokens": 113_445, "cached_tokens": 0}
    return row | {"generated_tokens": 128, "overlap": 0, "devices": devices}


def stamp(seconds: float) -> str:
    """RFC 3339, so long before now that the last of 20 steps of 90 s is a moment ago."""
    moment = time.gmtime(time.time() - 1800 + seconds)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", moment)


class Scripted:
    def __init__(self) -> None:
        self.url = ""
        self.stop: Callable[[], None]
        self.closing = False
        self.begin()
        routes = [
            Route("/admin/login", self._login, methods=["POST"]),
            Route("/admin/logout", self._logout, methods=["POST"]),
            Route("/admin/vram", self._keyed(lambda: self.vram)),
            Route("/admin/vram/history", self._keyed(lambda: {"every_seconds": 10, "devices": self.history})),
            Route("/admin/vram/requests", self._keyed(lambda: {"requests": self.requests})),
            Route("/admin/events", self._events),
            Route("/admin/trim", self._trim, methods=["POST"]),
            Route("/admin/reload", self._reload, methods=["POST"]),
            Route("/admin/watchdog", self._watchdog, methods=["PUT"]),
        ]
        self.app = FastAPI(openapi_url=None, routes=routes)
        self.app.include_router(page.router)

    def begin(self) -> None:
        """The report's two cards, and nothing that has happened."""
        self.vram = vram(device(0), losing(1))
        self.events: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []
        self.reload_status = 202
        self.refusal = ""
        """What a trim is refused with, if it is."""
        self.asked: list[tuple[str, Any]] = []
        """(method and path, body) of everything unsafe."""

    async def _login(self, request: Request) -> Response:
        if (await request.json())["key"] != KEY:
            return _refused()
        answer = Response(status_code=204)
        answer.set_cookie("ullage_admin", KEY, httponly=True, samesite="strict", path="/")
        return answer

    async def _logout(self, request: Request) -> Response:
        answer = Response(status_code=204)
        answer.delete_cookie("ullage_admin")
        return answer

    def _keyed(self, content: Callable[[], Any]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            return JSONResponse(content()) if _has_cookie(request) else _refused()

        return answer

    async def _events(self, request: Request) -> Response:
        if not _has_cookie(request):
            return _refused()
        if "text/event-stream" in request.headers["accept"]:
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        return JSONResponse({"events": self.events})

    async def _stream(self) -> AsyncIterator[str]:
        events, told = self.events, len(self.events)
        yield ": hello\n\n"
        while not self.closing and events is self.events:
            for happened in events[told:]:
                yield f"id: {happened['seq']}\ndata: {json.dumps(happened)}\n\n"
                told += 1
            await asyncio.sleep(0.01)

    async def _trim(self, request: Request) -> Response:
        self.asked.append(("POST /admin/trim", await request.json()))
        if self.refusal:
            return JSONResponse({"error": {"message": self.refusal}}, 503)
        return JSONResponse({"results": self.results})

    async def _reload(self, request: Request) -> Response:
        self.asked.append(("POST /admin/reload", await request.body()))
        return JSONResponse({"id": "reload-2", "generation": 3, "phase": "prepare"}, self.reload_status)

    async def _watchdog(self, request: Request) -> Response:
        self.asked.append(("PUT /admin/watchdog", await request.json()))
        return JSONResponse(self.asked[-1][1])


def _has_cookie(request: Request) -> bool:
    return request.cookies.get("ullage_admin") == KEY


def _refused() -> Response:
    message = "Missing or wrong API key: send it as 'Authorization: Bearer <key>'."
    return JSONResponse(
        {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}}, 401
    )


@contextmanager
def serving() -> Iterator[Scripted]:
    """The page and its scripted API, on a socket until left."""
    admin = Scripted()
    bound = bind("127.0.0.1", 0, "--ops-port")
    admin.url = url(bound, "127.0.0.1")
    listener = Listener(admin.app, bound)
    thread = threading.Thread(target=lambda: uvloop.run(listener.run_until_told()), name="scripted admin", daemon=True)
    thread.start()
    admin.stop = lambda: _stop(admin, listener, thread)
    try:
        yield admin
    finally:
        admin.stop()


def _stop(admin: Scripted, listener: Listener, thread: threading.Thread) -> None:
    admin.closing = True
    listener.should_exit = True
    thread.join(20)
