"""Every compilation there is: what a warm-up of the cache, and the tests that need no GPU, go through."""

from collections.abc import Iterator

from engine.ops.cuda import attention, embed, feed, linear, qkv, relay, rmsnorm, route, sample, silu_mul
from engine.ops.cuda.compile import Unit
from engine.ops.cuda.layout import FORMATS


def all_units() -> Iterator[Unit]:
    yield from (module.UNIT for module in (feed, qkv, rmsnorm, route, sample, silu_mul))
    for dim in attention.DIMS:
        for int8 in (False, True):
            yield from attention.units(dim, int8)
    for form in FORMATS.values():
        yield linear.unit(form)
        yield embed.unit(form)
        yield relay.unit(form)
