"""GET /live, /ready, /health: answered from the service's own loop, never through the engine.

/live says that this process answers (200 also while it loads, drains or waits for a new engine); /ready, and /health as
other servers call it, say that a request would be admitted now.
"""

from starlette.requests import Request
from starlette.responses import Response

from app.service import Service

OK = b'{"status":"ok"}'


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


async def live(request: Request) -> Response:
    return _json(OK)


async def ready(request: Request) -> Response:
    service: Service = request.app
    refusal = service.refusal()
    if refusal is not None:
        raise refusal
    return _json(OK)
