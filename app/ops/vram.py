"""GET /admin/vram and what belongs to it: the devices, their history, and the table of requests."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.errors import InvalidRequest
from app.events import rfc3339
from app.request_table import KEPT, as_csv
from app.service import Service, service_of
from watchdog.status import as_json

router = APIRouter()


def vram_json(service: Service) -> dict[str, Any]:
    """Byte counts are plain integers, unknown is null. On the plain CPU there are no devices."""
    scheduler, pressure = service.scheduler, service.pressure
    return {
        "devices": as_json(pressure.status()),
        "engine": service.supervisor.phase,
        "reload": service.supervisor.status(),
        "watchdog": watchdog_json(service),
        "queue": {
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "held": scheduler.held,
            "lost": service.metrics.lost,
        },
        "model": service.model_id,
        "version": service.version,
    }


def watchdog_json(service: Service) -> dict[str, Any]:
    until = service.pressure.until
    return {"mode": service.pressure.mode, "until": None if until is None else rfc3339(until.timestamp())}


@router.get("/admin/vram")
async def vram(request: Request) -> Response:
    service = service_of(request)
    return JSONResponse(vram_json(service))


@router.get("/admin/vram/history")
async def history(request: Request) -> Response:
    service = service_of(request)
    return JSONResponse(service.history.json())


@router.get("/admin/vram/requests")
async def requests(request: Request) -> Response:
    """The last `limit` requests, oldest first, as JSON or as CSV."""
    service = service_of(request)
    rows = service.table.rows[-_limit(request) :]
    form = request.query_params.get("format", "json")
    if form == "csv":
        return Response(as_csv(rows), media_type="text/csv")
    if form != "json":
        raise InvalidRequest("format: there are json and csv.", param="format")
    return Response(msgspec.json.encode({"requests": rows}), media_type="application/json")


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(KEPT))
    if not (given.isascii() and given.isdecimal() and 1 <= int(given) <= KEPT):
        raise InvalidRequest(f"limit: expected 1 to {KEPT}.", param="limit")
    return int(given)
