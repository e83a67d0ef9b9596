"""Every compilation there is: what a warm-up of the cache, and the tests that need no GPU, go through."""

from collections.abc import Iterator

from engine.ops.cuda import embed, linear
from engine.ops.cuda.compile import Unit
from engine.ops.cuda.layout import FORMATS


def all_units() -> Iterator[Unit]:
    for form in FORMATS.values():
        yield linear.unit(form)
        yield embed.unit(form)
