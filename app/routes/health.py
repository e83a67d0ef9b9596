"""GET /live, /ready, /health: answered from the service's own loop, never through the engine.

/live says that this process answers (200 also while it loads, drains or waits for a new engine); /ready, and /health as
other servers call it, say that a request would be admitted now.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.service import service_of

router = APIRouter()

OK = b'{"status":"ok"}'


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


@router.get("/live")
async def live(request: Request) -> Response:
    return _json(OK)


@router.get("/ready")
@router.get("/health")
async def ready(request: Request) -> Response:
    refusal = service_of(request).refusal()
    if refusal is not None:
        raise refusal
    return _json(OK)
