"""attention against the twin, and to the bit against itself however a prompt is cut and whoever decodes beside it."""

import numpy as np
import pytest

from engine.kv_cache.storage import KvStorage, allocate_kv
from engine.ops import reference
from engine.ops.backend import Heads
from engine.ops.cpu import attention as kernel
from engine.ops.cpu.memory import aligned_empty
from engine.ops.cpu.store import store
from engine.ops.rows import Rows, Span
from tests.engine.ops.cpu.matrices import random

DTYPES = ("f32", "f16", "int8")
SHAPES = (Heads(4, 2, 32), Heads(9, 3, 64), Heads(8, 1, 128), Heads(2, 2, 256), Heads(3, 3, 40), Heads(6, 2, 8))


def forward(qkv: np.ndarray, heads: Heads, spans: list[Span], kv: KvStorage, threads: int = 2) -> np.ndarray:
    """Store, then attend, as a layer does."""
    rows = Rows.of(spans)
    out = np.full((len(qkv), heads.heads * heads.dim), np.nan, np.float32)
    scratch = aligned_empty((threads, kernel.scratch_elements(heads)))
    scratch[:] = np.nan  # nothing that was there may matter
    store(qkv, heads, rows, kv, 0)
    kernel.attention(qkv, heads, kernel.pieces(rows.spans, heads), rows.tables, kv, 0, out, scratch)
    return out


def width(heads: Heads) -> int:
    return (heads.heads + 2 * heads.kv_heads) * heads.dim


def storage(dtype: str, heads: Heads, blocks: int = 9) -> KvStorage:
    kv = allocate_kv(dtype, 1, blocks, heads.kv_heads, heads.dim)
    # What freed blocks hold belongs to others and may be anything.
    kv.data[:] = np.nan if dtype == "f32" else 0x7E00 if dtype == "f16" else 99
    kv.scales[:] = 0x7E00
    return kv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_equals_the_twin(rng, heads, dtype):
    kv = storage(dtype, heads)
    spans = [Span([0] * 70, 0, [5, 2]), Span([0], 0, [7]), Span([0] * 3, 0, [1])]
    qkv = random(rng, 74, width(heads))
    out = forward(qkv, heads, spans, kv)
    q = reference.split_heads(qkv, heads)[0]
    expected = reference.attention(q, Rows.of(spans), kv, 0)
    # Both read the same stored K and V; scores are sums of `dim` products of order 1.
    np.testing.assert_allclose(out.reshape(expected.shape), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(2, 2, 40), Heads(16, 1, 32)], ids=str)
def test_every_way_to_cut_a_prompt_gives_the_same_bits(rng, heads, dtype):
    length = 150
    qkv = random(rng, length, width(heads))
    whole = forward(qkv, heads, [Span([0] * length, 0, [3, 0, 6])], storage(dtype, heads))
    for chunk in (1, 7, 64, 100):
        kv, parts = storage(dtype, heads), []
        for start in range(0, length, chunk):
            part = qkv[start : start + chunk]
            parts.append(forward(part, heads, [Span([0] * len(part), start, [1, 8, 4])], kv))
        assert (np.concatenate(parts) == whole).all(), chunk


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_in_a_batch_change_nothing(rng, dtype):
    """Many sequences of different length, each one row, in any order, with a prompt beside them."""
    heads, lengths = Heads(6, 2, 32), [1, 2, 3, 17, 63, 64, 65, 120, 128]
    kv = storage(dtype, heads, blocks=24)
    tables = [[2 * i, 2 * i + 1] for i in range(len(lengths))]
    for length, table in zip(lengths, tables, strict=True):
        if length > 1:
            forward(random(rng, length - 1, width(heads)), heads, [Span([0] * (length - 1), 0, table)], kv)
    rows = random(rng, len(lengths), width(heads))
    spans = [Span([0], length - 1, table) for length, table in zip(lengths, tables, strict=True)]
    alone = [forward(rows[i : i + 1], heads, [spans[i]], kv) for i in range(len(spans))]
    prompt = random(rng, 40, width(heads))
    for _ in range(4):
        order = rng.permutation(len(spans))
        batch = np.concatenate([rows[order], prompt])
        out = forward(batch, heads, [*(spans[i] for i in order), Span([0] * 40, 0, [20])], kv)
        for place, i in enumerate(order):
            assert (out[place] == alone[i][0]).all()


def test_threads_change_nothing(rng):
    heads = Heads(4, 2, 64)
    qkv, spans = random(rng, 90, width(heads)), [Span([0] * 80, 0, [0, 1]), Span([0] * 10, 0, [2])]
    one = forward(qkv, heads, spans, storage("f32", heads), threads=1)
    assert (forward(qkv, heads, spans, storage("f32", heads), threads=2) == one).all()


def test_pieces_cover_every_row_once():
    heads = Heads(9, 3, 64)
    spans = np.array([[0, 1, 17], [1, 100, 64], [101, 22, 0]])
    covered = [
        (row + i, position + i, span)
        for row, rows, position, span in kernel.pieces(spans, heads).tolist()
        for i in range(rows)
    ]
    expected = [
        (first + i, start + i, span) for span, (first, count, start) in enumerate(spans.tolist()) for i in range(count)
    ]
    assert covered == expected


def test_large_scores_neither_overflow_nor_vanish(rng):
    heads = Heads(1, 1, 16)
    qkv = random(rng, 70, width(heads))
    qkv[:, :32] *= 100
    out = forward(qkv, heads, [Span([0] * 70, 0, [0, 1])], storage("f32", heads))
    assert np.isfinite(out).all()
    kv = storage("f32", heads)
    forward(qkv, heads, [Span([0] * 70, 0, [0, 1])], kv)
    expected = reference.attention(qkv[:, None, :16], Rows.of([Span([0] * 70, 0, [0, 1])]), kv, 0)
    # Scores of 10**4 carry an absolute error of 10**-3, which the softmax turns into a relative one.
    np.testing.assert_allclose(out, expected[:, 0], rtol=2e-2, atol=2e-2)
