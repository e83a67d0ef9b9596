"""POST /admin/login and /admin/logout: the status page gives the key once and is known by a cookie from then on."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from app.errors import InvalidApiKey
from app.ops.body import read
from app.service import Service


class LoginBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str


async def login(request: Request) -> Response:
    """204 with the cookie; 401 for a wrong key, 429 after many of them."""
    service: Service = request.app
    service.sessions.may_try()
    body = await read(request, LoginBody)
    if not service.admin_keys.has(body.key.encode()):
        service.sessions.failed()
        raise InvalidApiKey("This is not the admin key.")
    return Response(status_code=204, headers={"set-cookie": service.sessions.cookie(request.scope)})


async def logout(request: Request) -> Response:
    service: Service = request.app
    return Response(status_code=204, headers={"set-cookie": service.sessions.no_cookie(request.scope)})
