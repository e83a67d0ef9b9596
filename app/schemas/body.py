"""A request body: taken in under the limit, parsed strictly, and refused by the name of the field.

JSON is RFC 8259 and nothing more: no NaN, no lone surrogate, no invalid UTF-8, no number beyond a double, no nesting
beyond the interpreter's own depth. Messages name the place and what was expected there, never what was found.
"""

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from app.access import header
from app.errors import BodyTooLarge, InvalidRequest, UnsupportedParameter
from app.schemas.elements import ElementCounter

MIB = 1 << 20
PLACE = re.compile(r" - at `(?:key` in `)?\$([^`]*)`$")
UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
MISSING_FIELD = re.compile(r"Object missing required field `(.*)`$")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Schema = TypeVar("Schema", bound=msgspec.Struct)


async def read_body(
    scope: Scope, receive: Receive, limit_mib: int, max_elements: int, count: Callable[[int], None]
) -> bytes:
    """The whole body; `count` is told of each part's bytes as it comes, and may raise.

    Raises BodyTooLarge and InvalidRequest (too many elements) as soon as it is known, and ClientDisconnect.
    """
    limit = limit_mib * MIB
    declared = header(scope, b"content-length")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(limit_mib)
    elements = ElementCounter(max_elements)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge(limit_mib)
        count(len(part))
        elements.feed(part)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def parse(body: bytes, schema: type[Schema]) -> Schema:
    """The body as `schema`. Raises InvalidRequest or UnsupportedParameter."""
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        raise _complaint(str(error)) from None
    except msgspec.DecodeError:
        raise InvalidRequest("The request body is not valid JSON.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.", code="invalid_json") from None


def _complaint(problem: str) -> InvalidRequest:
    """msgspec's message as OpenAI's error: the place becomes `param`."""
    found = PLACE.search(problem)
    place = found[1].lstrip(".") if found else ""
    problem = problem[: found.start()] if found else problem
    if unknown := UNKNOWN_FIELD.match(problem):
        return UnsupportedParameter(_join(place, unknown[1]))
    if missing := MISSING_FIELD.match(problem):
        param = _join(place, missing[1])
        return InvalidRequest(f"Missing required parameter: {param}.", param=param, code="missing_required_parameter")
    if problem.startswith("Expected `null`") or problem.endswith("of length <= 0"):
        return UnsupportedParameter(place)
    what = "Invalid value" if problem.startswith("Invalid") else problem.replace("`", "")
    return InvalidRequest(f"{place or 'The request body'}: {what}.", param=place or None)


def _join(place: str, name: str) -> str:
    """A field that we do not know is named only if it looks like a name: it is the client's own text."""
    name = name if PLAIN_NAME.fullmatch(name) else "(a field with an unusual name)"
    return f"{place}.{name}" if place else name
