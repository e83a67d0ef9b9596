import json
import random

import pytest

from app.errors import InvalidRequest
from app.schemas.elements import ElementCounter

TRICKY = json.dumps(
    {"a, b": ["x,y", 'quote " and \\ backslash\\', "\\", '"', ",", "é\n", ""], "n": [1, 2, [3, {"k": 4}]], "z": None}
).encode()
COUNT = 4 + 7 + 6 + 5
"""Strings and commas of TRICKY: keys, values, commas of the list of strings, other commas."""


def fits(parts: list[bytes], limit: int) -> bool:
    counter = ElementCounter(limit)
    try:
        for part in parts:
            counter.feed(part)
    except InvalidRequest:
        return False
    return True


def test_strings_and_commas_count_and_what_is_in_strings_does_not() -> None:
    assert fits([TRICKY], COUNT)
    assert not fits([TRICKY], COUNT - 1)


@pytest.mark.parametrize("seed", range(50))
def test_cuts_anywhere_cost_at_most_one_each(seed: int) -> None:
    draw = random.Random(seed)
    cuts = sorted(draw.choices(range(len(TRICKY) + 1), k=draw.randint(1, 30)))
    parts = [TRICKY[start:end] for start, end in zip([0, *cuts], [*cuts, len(TRICKY)], strict=True)]
    assert fits(parts, COUNT + len(cuts))
    assert not fits(parts, COUNT - 1)


def test_byte_by_byte_is_the_same_string() -> None:
    escapes = rb'"\\\"\\,\",\\"'
    assert fits([bytes([byte]) for byte in escapes], len(escapes))
    assert not fits([bytes([byte]) for byte in escapes + b",,,,,"], len(escapes))


@pytest.mark.parametrize("body", [b"1," * 1000, b'"",' * 1000, b"{}," * 1000, b'[{"role":"user"},' * 301])
def test_structure_is_refused(body: bytes) -> None:
    assert not fits([body], 900)


def test_text_is_not() -> None:
    assert fits([b'"' + b'word, and \\"word\\", ' * 100_000], 1)
