"""Bounds what a body may hold besides text, while it comes in.

A megabyte of text is parsed in a millisecond or two, a megabyte of `{},` or `1,` in fifty, and nothing else happens in
that time. So strings and commas are counted first, part by part, and a body of too many is refused before it is whole.
"""

import re

from app.errors import InvalidRequest

STRING_OR_COMMA = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|(\\?)\Z)|,', re.DOTALL)
"""Group 1 is there when the string goes on beyond the end, and holds a backslash whose partner is beyond it too."""


class ElementCounter:
    """Counts strings and commas of JSON that comes in parts. A string that is cut counts once more."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._open = b""
        """What the next part begins within: nothing, a string, or a string after a backslash."""

    def feed(self, part: bytes) -> None:
        """Raises InvalidRequest as soon as there are more than the limit."""
        if not part:
            return
        count, opened = self._count, b""
        for match in STRING_OR_COMMA.finditer(self._open + part):
            count += 1
            if count > self._limit:
                raise InvalidRequest(
                    f"The request has more than {self._limit} elements (messages, parts, token ids and their fields).",
                    code="too_many_elements",
                )
            if match[1] is not None:
                opened = b'"' + match[1]
        self._count, self._open = count, opened
