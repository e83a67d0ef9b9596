"""POST /admin/login and /admin/logout: the status page gives the key once and is known by a cookie from then on."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.errors import InvalidApiKey
from app.ops.body import read
from app.service import service_of

router = APIRouter()


class LoginBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str


@router.post("/admin/login")
async def login(request: Request) -> Response:
    """204 with the cookie; 401 for a wrong key, 429 after many of them."""
    service = service_of(request)
    service.sessions.may_try()
    body = await read(request, LoginBody)
    if not service.admin_keys.has(body.key.encode()):
        service.sessions.failed()
        raise InvalidApiKey("This is not the admin key.")
    return Response(status_code=204, headers={"set-cookie": service.sessions.cookie(request.scope)})


@router.post("/admin/logout")
async def logout(request: Request) -> Response:
    service = service_of(request)
    return Response(status_code=204, headers={"set-cookie": service.sessions.no_cookie(request.scope)})
