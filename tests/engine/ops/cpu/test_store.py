import numpy as np
import pytest

from engine.kv_cache.storage import allocate_kv
from engine.ops import reference
from engine.ops.backend import Heads
from engine.ops.cpu.store import store
from engine.ops.rows import Rows, Span
from tests.engine.ops.cpu.matrices import random

HEADS = Heads(4, 2, 24)
SPANS = [Span([0] * 70, 10, [3, 1]), Span([0], 63, [2]), Span([0], 0, [0])]


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8"])
def test_equals_the_twin(rng, dtype):
    rows, qkv = Rows.of(SPANS), random(rng, 72, 8 * 24)
    qkv[5] = 0
    qkv[6] *= 1000
    ours, twins = (allocate_kv(dtype, 2, 5, 2, 24) for _ in range(2))
    store(qkv, HEADS, rows, ours, 1)
    reference.store(*reference.split_heads(qkv, HEADS)[1:], rows, twins, 1)
    assert (ours.scales == twins.scales).all()
    # An int8 code may differ by one where the quotient lies on the border.
    assert np.abs(ours.data.astype(np.float64) - twins.data).max() <= (dtype == "int8")
    assert not ours.data[0].any()


def test_int8_is_within_half_a_code(rng):
    rows, qkv, kv = Rows.of(SPANS), random(rng, 72, 8 * 24), allocate_kv("int8", 1, 5, 2, 24)
    store(qkv, HEADS, rows, kv, 0)
    k = reference.split_heads(qkv, HEADS)[1]
    stored = reference.stored(kv, 0, 0, rows.tables[0], 80)[10:]
    greatest = np.abs(k[:70]).max(axis=-1, keepdims=True)
    assert (np.abs(stored - k[:70]) <= greatest * (0.5 / 127 + 2**-10)).all()


def test_f16_saturates():
    kv = allocate_kv("f16", 1, 1, 2, 24)
    qkv = np.full((1, 8 * 24), 1e6, np.float32)
    store(qkv, HEADS, Rows.of([Span([0], 0, [0])]), kv, 0)
    assert (kv.data[0, :, 0, :, 0].view(np.float16) == 65504).all()
