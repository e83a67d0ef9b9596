"""The status page at / on the ops listener: static files that show what /admin/* tells.

The files hold no data, so anybody who may reach the listener gets them, the form for the admin key included. What they
show is asked for with the cookie that POST /admin/login sets, and never with a key in a URL.
"""

from functools import cache
from importlib import resources

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.errors import NotFound

router = APIRouter()

FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "uPlot.min.css": "text/css; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # a script that would write markup fails, so data can only be text
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


@router.get("/")
async def page(request: Request) -> Response:
    return _answer("index.html")


@router.get("/page/{file}")
async def part(request: Request) -> Response:
    """One of the files that the page names. Raises NotFound for anything else."""
    return _answer(request.path_params["file"])


def _answer(name: str) -> Response:
    if name not in FILES:
        raise NotFound
    return Response(_content(name), headers={**HEADERS, "content-type": FILES[name]})


@cache
def _content(name: str) -> bytes:
    """A page and its script stay of one version, also while the files are upgraded under the service."""
    folder = resources.files("app.ops") / "page"
    return (folder / "uplot" / name if name.startswith("uPlot") else folder / name).read_bytes()
