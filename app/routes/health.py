"""GET /live, /ready, /health: answered from the service's own loop, never through the engine.

/live says that this process answers (200 also while it loads, drains or waits for a new engine; 503 only when an engine
that cannot be killed is in the way of the next); /ready, and /health as other servers call it, say that a request would
be admitted now, or held for as long as a reload takes.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.errors import EngineStuck
from app.service import service_of

router = APIRouter()

PROBES = ["GET", "HEAD"]
"""Some load balancers ask for the head only."""

OK = b'{"status":"ok"}'


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


@router.api_route("/live", methods=PROBES)
async def live(request: Request) -> Response:
    if service_of(request).supervisor.phase == "stuck":
        raise EngineStuck
    return _json(OK)


@router.api_route("/ready", methods=PROBES)
@router.api_route("/health", methods=PROBES)
async def ready(request: Request) -> Response:
    refusal = service_of(request).unreadiness()
    if refusal is not None:
        raise refusal
    return _json(OK)
