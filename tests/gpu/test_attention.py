"""qkv.cu, attention_decode.cu and attention_prefill.cu against the NumPy twin, over head dimensions, ratios, cache
types.

The twin computes in float32 from the same cache. Ours rounds Q, and the probabilities, to f16: 2^-12 of a value on
average a quarter of that, hence 1e-3 in the norm; what is stored must be the twin's to a last place (f16) or one step
(int8).
"""

from typing import Any

import cupy as cp
import numpy as np
import pytest

from engine.kv_cache.storage import allocate_kv
from engine.ops import reference
from engine.ops.backend import Rope
from engine.ops.cuda.attention import Attention, Parts
from engine.ops.cuda.cache import Cache
from engine.ops.cuda.qkv import Qkv, Rotation
from engine.ops.cuda.room import Room
from engine.ops.rows import Rows, Span
from engine.plan.scratch import attention_buffers

CLOSE = 1e-3
SHAPES = [(9, 3, 64), (32, 8, 128), (4, 1, 256), (4, 2, 32), (40, 2, 128), (8, 8, 64)]


def error(ours: Any, wanted: Any) -> float:
    assert not np.isnan(ours).any()
    return float(np.linalg.norm(ours.astype(np.float64) - wanted) / np.linalg.norm(wanted))


def padded(rows: Any, places: list[int | None], fill: int) -> Any:
    """The rows at `places`, `fill` where there is none."""
    out = cp.full((len(places), *rows.shape[1:]), fill, rows.dtype)
    for i, place in enumerate(places):
        if place is not None:
            out[i] = rows[place]
    return out


class Setting:
    """A cache of shuffled blocks, filled through qkv.cu and by the twin from the same numbers."""

    def __init__(
        self, kernels: Any, shape: tuple[int, int, int], dtype: str, lengths: list[int], seed: int = 0
    ) -> None:
        self.heads, self.kv_heads, self.dim = shape
        self.rng = np.random.default_rng(seed)
        blocks = [-(-length // 64) for length in lengths]
        order = self.rng.permutation(sum(blocks) + 3)
        tables = np.split(order, np.cumsum(blocks))[:-1]
        self.spans = [Span([0] * n, 0, list(table)) for n, table in zip(lengths, tables, strict=True)]
        self.kv = allocate_kv(dtype, 2, sum(blocks) + 3, self.kv_heads, self.dim)  # type: ignore[arg-type]
        poison = np.int8(-128) if dtype == "int8" else np.uint16(0x7E00)  # NaN, where nothing was stored
        self.kv.data[...] = poison
        self.kv.scales[...] = 0x7E00
        data = cp.asarray(self.kv.data) if dtype == "int8" else cp.asarray(self.kv.data).view(cp.float16)
        width = max(blocks) + 1
        padded = np.zeros((len(tables), width), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        scales = cp.asarray(self.kv.scales).view(cp.float16) if dtype == "int8" else None
        self.cache = Cache(data, scales, cp.asarray(padded))
        pairs = self.dim // 2
        self.turn = Rope(10000.0 ** (-np.arange(pairs) / pairs), 1.1, self.heads == 9)
        self.rotation = Rotation(cp.asarray(self.turn.frequencies), self.turn.magnitude, self.turn.interleaved)
        self.norms = [self.rng.uniform(0.5, 1.5, self.dim).astype(np.float32) for _ in range(2)]
        self.qkv = Qkv(kernels)

    def fill(self, stream: Any, layer: int = 1, norm: bool = True) -> tuple[np.ndarray, np.ndarray, Rows]:
        """K and V of all positions into both caches; the turned Q of ours and of the twin."""
        rows = Rows.of(self.spans)
        qkv = self.rng.standard_normal((len(rows), (self.heads + 2 * self.kv_heads) * self.dim)).astype(np.float32)
        q = cp.full((len(rows), self.heads * self.dim), np.nan, cp.float16)
        positions, sequences = (cp.asarray(a.astype(np.int32)) for a in (rows.positions, rows.sequences))
        norms = (cp.asarray(self.norms[0]), cp.asarray(self.norms[1]), 1e-6) if norm else None
        self.qkv(cp.asarray(qkv), q, self.cache, layer, self.rotation, positions, sequences, stream, norms)
        parts = qkv.reshape(len(rows), -1, self.dim)
        k_end = self.heads + self.kv_heads
        own_q, own_k, own_v = parts[:, : self.heads], parts[:, self.heads : k_end], parts[:, k_end:]
        if norm:
            own_q, own_k = (reference.rmsnorm(x, w, 1e-6) for x, w in zip((own_q, own_k), self.norms, strict=True))
        own_q, own_k = (reference.rope(x, rows.positions, self.turn) for x in (own_q, own_k))
        reference.store(own_k, own_v, rows, self.kv, layer)
        return cp.asnumpy(q), own_q, rows

    def adopt(self) -> None:
        """Give the twin our cache, so that attention is compared over the same stored values."""
        self.kv.data[...] = cp.asnumpy(self.cache.data).view(self.kv.data.dtype)
        if self.cache.scales is not None:
            self.kv.scales[...] = cp.asnumpy(self.cache.scales).view(np.uint16)

    def wanted(self, q: np.ndarray, rows: Rows, layer: int = 1) -> np.ndarray:
        return reference.attention(q.reshape(len(q), self.heads, self.dim), rows, self.kv, layer).reshape(len(q), -1)


@pytest.mark.parametrize("dtype", ["f16", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_qkv(kernels: Any, stream: Any, shape: tuple[int, int, int], dtype: str) -> None:
    setting = Setting(kernels, shape, dtype, [70, 5, 129])
    ours, wanted, _ = setting.fill(stream, norm=shape[0] != 9)
    assert error(ours, wanted.reshape(len(ours), -1)) < 5e-4
    stored = cp.asnumpy(setting.cache.data)
    if dtype == "int8":
        unwritten = setting.kv.data == -128
        assert np.array_equal(stored == -128, unwritten)
        step = np.abs(stored.astype(int) - setting.kv.data)
        assert step.max() <= 1
        assert (step > 0).mean() < 1e-3
        scales = cp.asnumpy(setting.cache.scales).astype(np.float64)
        assert np.nanmax(np.abs(scales / setting.kv.scales.view(np.float16).astype(np.float64) - 1)) < 2e-3
    else:
        theirs = setting.kv.data.view(np.float16)
        assert np.array_equal(np.isnan(stored), np.isnan(theirs))
        close = np.abs(stored.astype(np.float64) - theirs) <= 2**-9 * np.abs(theirs) + 2**-22
        assert (close | np.isnan(theirs)).all()


@pytest.mark.parametrize("dtype", ["f16", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(kernels: Any, stream: Any, shape: tuple[int, int, int], dtype: str) -> None:
    """Lengths around tiles, blocks and runs; decode of the last rows; prefill whole, and in two chunks, to the same
    bits."""
    lengths = [1, 63, 64, 65, 150, 300, 4500]
    setting = Setting(kernels, shape, dtype, lengths)
    q, _, rows = setting.fill(stream)
    setting.adopt()
    attention = Attention(kernels, setting.dim, dtype == "int8")
    device_q, width = cp.asarray(q), setting.heads * setting.dim
    positions, sequences = (cp.asarray(a.astype(np.int32)) for a in (rows.positions, rows.sequences))
    ends = np.cumsum(lengths) - 1

    room = Parts.of(Room.allocate(attention_buffers(16, setting.heads, setting.dim)))
    last = cp.asarray(ends)
    args = (
        cp.ascontiguousarray(device_q[last]),
        cp.ascontiguousarray(positions[last]),
        cp.ascontiguousarray(sequences[last]),
    )
    out = cp.full((len(lengths), width + 64), np.nan, cp.float16)
    attention.decode(args[0], out[:, :width], setting.cache, 1, args[1], args[2], room, stream)
    picked = Rows(rows.tokens[ends], rows.positions[ends], rows.sequences[ends], rows.spans, rows.tables)
    wanted = setting.wanted(q[ends].astype(np.float32), picked)
    ours = cp.asnumpy(out[:, :width])
    for i, length in enumerate(lengths):
        assert error(ours[i], wanted[i]) < CLOSE, length

    # The same rows in another order, with padding between and neighbours gone: the same bits.
    shuffled = [padded(a, [6, None, 2, 5, None], fill) for a, fill in zip(args, (0, -1, 0), strict=True)]
    again = cp.full((5, width), np.nan, cp.float16)
    attention.decode(shuffled[0], again, setting.cache, 1, shuffled[1], shuffled[2], room, stream)
    again = cp.asnumpy(again)
    assert np.array_equal(again[[0, 2, 3]], ours[[6, 2, 5]])
    assert not again[[1, 4]].any()

    for index in (3, 5):
        begin, end = ends[index] - lengths[index] + 1, ends[index] + 1
        chosen = Rows(
            rows.tokens[begin:end], rows.positions[begin:end], rows.sequences[begin:end], rows.spans, rows.tables
        )
        wanted = setting.wanted(q[begin:end].astype(np.float32), chosen)
        whole = cp.full((end - begin, width), np.nan, cp.float16)
        attention.prefill(
            device_q[begin:end], whole, setting.cache, 1, positions[begin:end], sequences[begin:end], stream
        )
        whole = cp.asnumpy(whole)
        assert error(whole, wanted) < CLOSE
        cut = 37
        chunk = cp.full((128, width), np.nan, cp.float16)
        count = min(128, end - begin - cut)
        places = [*range(begin + cut, begin + cut + count), *[None] * (128 - count)]
        parts = [padded(a, places, fill) for a, fill in ((device_q, 0), (positions, -1), (sequences, 0))]
        attention.prefill(parts[0], chunk, setting.cache, 1, parts[1], parts[2], stream)
        chunk = cp.asnumpy(chunk)
        assert np.array_equal(chunk[:count], whole[cut : cut + count])
        assert np.isnan(chunk[count:]).all()
