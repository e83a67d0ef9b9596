"""The small bodies of the ops listener."""

from typing import TypeVar

import msgspec
from starlette.requests import Request

from app.schemas.body import parse, read_body

LIMIT_MIB = 1
MOST_ELEMENTS = 1000

Schema = TypeVar("Schema", bound=msgspec.Struct)


async def read(request: Request, schema: type[Schema]) -> Schema:
    """The body as `schema`; none at all is an empty one. Raises InvalidRequest, UnsupportedParameter, BodyTooLarge."""
    raw = await read_body(request.scope, request.receive, LIMIT_MIB, MOST_ELEMENTS, lambda amount: None)
    return parse(raw or b"{}", schema)
