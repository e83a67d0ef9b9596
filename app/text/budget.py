"""What one rendering of a chat template may use: time, text made, nesting of its values.

A template comes with the model file, which may come from anywhere, and runs in a thread that nobody can stop from
outside. So everything that a template can repeat or multiply asks here first: `app/text/sandbox.py` sees to it.
"""

import time
from collections.abc import Iterable
from itertools import chain

MAX_OUTPUT_CHARS = 16 << 20
MAX_MADE_CHARS = 256 << 20
"""All text and lists made on the way, also those dropped again; it bounds memory and time alike."""
MAX_VALUE_CHARS = 16 << 20
"""One list or dict, written out, things in it twice counted twice: comparing or printing it takes so long at most."""
MAX_DEPTH = 64
MAX_INTEGER_BITS = 4096
MAX_SECONDS = 5.0

ITEM_CHARS = 64
"""An object other than text is charged as so many characters,"""
REFERENCE_CHARS = 8
"""and an element of a list, which only refers to one, as so many."""

_NOTHING: dict[str, str] = {}
_CONTAINERS = (list, tuple, dict, type(_NOTHING.keys()), type(_NOTHING.values()), type(_NOTHING.items()))


class TemplateError(Exception):
    """The template cannot be rendered with these messages; the text is for the client."""


class Budget:
    """Counts down for one rendering. Not shared between threads."""

    __slots__ = ("_deadline", "_left", "_weights")

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._left = MAX_MADE_CHARS
        self._weights: dict[int, tuple[object, int, int]] = {}  # id → the value itself, so the id stays its own

    def charge(self, chars: int) -> None:
        """Raises TemplateError when the template has made too much text or taken too long."""
        self._left -= chars
        if self._left < 0:
            raise TemplateError("the chat template makes too much text")
        if time.monotonic() > self._deadline:
            raise TemplateError(f"the chat template took longer than {MAX_SECONDS:g} s")

    def charge_for(self, value: object) -> None:
        self.charge(size(value))

    def weigh(self, value: object) -> tuple[int, int]:
        """(characters when written out, depth of nesting); shared parts count each time they are reached.

        Templates cannot change a list or dict, so each is weighed once and a loop that appends stays cheap.

        Raises:
            TemplateError: over MAX_VALUE_CHARS or MAX_DEPTH.
        """
        if isinstance(value, str):
            return len(value) + ITEM_CHARS, 0
        if not isinstance(value, _CONTAINERS):
            return ITEM_CHARS, 0
        known = self._weights.get(id(value))
        if known is not None:
            return known[1], known[2]
        parts: Iterable[object] = chain.from_iterable(value.items()) if isinstance(value, dict) else value
        weight, depth = ITEM_CHARS, 0
        for part in parts:
            part_weight, part_depth = self.weigh(part)
            weight += part_weight
            depth = max(depth, part_depth)
        return self.record(value, weight, depth + 1)

    def record(self, value: object, weight: int, depth: int) -> tuple[int, int]:
        """`weigh` for a container whose weight is known from what it was made of."""
        if weight > MAX_VALUE_CHARS or depth > MAX_DEPTH:
            raise TemplateError("the chat template builds too large a value")
        self._weights[id(value)] = (value, weight, depth)
        return weight, depth


def size(value: object) -> int:
    """What making `value` is charged; parts that existed before are only referred to."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (list, tuple, dict)):
        return REFERENCE_CHARS * len(value)
    if isinstance(value, int):
        return value.bit_length() >> 3
    return 0
