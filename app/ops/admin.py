"""POST /admin/trim, /admin/reload, /admin/drain, PUT /admin/watchdog: what an operator may have done."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.errors import EngineUnavailable, InvalidRequest
from app.ops.body import read
from app.ops.vram import watchdog_json
from app.recovery import ReloadInProgress
from app.service import service_of
from engine.errors import EngineDied
from watchdog.actions import TRIMS, Rung

router = APIRouter()


class TrimBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`rung` None: the whole ladder without reload. `device` None: all."""

    rung: str | None = None
    device: int | None = None


class NoBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class WatchdogBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`until`: RFC 3339; None: until it is set again, or the service starts again."""

    mode: Literal["on", "dry-run", "off"]
    until: str | None = None


@router.post("/admin/trim")
async def trim(request: Request) -> Response:
    service = service_of(request)
    body = await read(request, TrimBody)
    rungs = _rungs(body.rung)
    _check_device(body.device, service.pressure.devices)
    if not service.pressure.devices:
        return JSONResponse({"results": []})
    service.require_engine()
    try:
        done = await service.pressure.trim(rungs, body.device)
    except EngineDied:
        raise EngineUnavailable("The engine ended meanwhile.", retry_after_s=service.scheduler.retry_after_s) from None
    return JSONResponse({"results": [each.json() for each in done]})


@router.post("/admin/reload")
async def reload(request: Request) -> Response:
    """202, or 409 during another one; either way with how far it is."""
    service = service_of(request)
    await read(request, NoBody)
    try:
        return JSONResponse(service.supervisor.reload("operator"), 202)
    except ReloadInProgress as busy:
        return JSONResponse(busy.progress, 409)


@router.post("/admin/drain")
async def drain(request: Request) -> Response:
    """From now on new requests are refused, and those that were admitted go on. The process goes on too."""
    service = service_of(request)
    await read(request, NoBody)
    if not service.scheduler.draining:
        service.scheduler.drain()
        service.events.record("service", "drains, as an operator asked: new requests are refused")
    return JSONResponse({"draining": True, "running": service.scheduler.running}, 202)


@router.put("/admin/watchdog")
async def watchdog(request: Request) -> Response:
    service = service_of(request)
    body = await read(request, WatchdogBody)
    if not service.pressure.devices:
        raise InvalidRequest("There is no device here, so the watchdog is disabled.", param="mode", code="no_devices")
    service.pressure.set_mode(body.mode, _moment(body.until))
    return JSONResponse(watchdog_json(service))


def _rungs(name: str | None) -> Sequence[Rung]:
    if name is None:
        return TRIMS
    for rung in TRIMS:
        if rung.value == name:
            return (rung,)
    names = ", ".join(TRIMS)
    raise InvalidRequest(f"There is no such rung; there are {names}.", param="rung", code="unknown_rung")


def _check_device(device: int | None, count: int) -> None:
    if device is not None and not 0 <= device < count:
        names = ", ".join(map(str, range(count))) or "none"
        raise InvalidRequest(f"There is no such device; there are {names}.", param="device", code="unknown_device")


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = datetime.min
    if moment.tzinfo is None:
        raise InvalidRequest("until: expected a time as in 2026-12-01T08:30:00Z.", param="until")
    if moment <= datetime.now(UTC):
        raise InvalidRequest("until: that time has passed.", param="until")
    return moment
