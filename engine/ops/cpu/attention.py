"""attention: out = softmax(Q Kᵀ / sqrt(dim)) V over each row's own and earlier positions, grouped heads, paged KV.

One piece of work is a few rows of one sequence and one KV head, with all query heads that share it. It walks the
sequence's blocks in order. Per block: K and V are widened to float32 as they are stored (tokens of this very forward
too), scores by dot_tile, then the running softmax: with peak m and mass l so far,

    m' = max(m, max s),  p = e^(s - m'),  l' = l e^(m - m') + sum p,  acc' = acc e^(m - m') + p V.

The block's 64 tokens are the fixed unit of this recurrence, and every row meets its own blocks in the same order with
the same operations: a row depends neither on what is computed beside it nor on how its prompt was cut. Threads draw
pieces of work from one counter, since these are of very different length.
"""

import numba
import numpy as np
import numpy.typing as npt

from engine.config import BLOCK_TOKENS
from engine.kv_cache.storage import KvStorage
from engine.ops.backend import Heads
from engine.ops.cpu.compiled import inner, kernel
from engine.ops.cpu.exponential import exponential, exponentials
from engine.ops.cpu.lanes import (
    LANES,
    add,
    greatest,
    larger,
    load,
    load_codes,
    load_floats,
    load_halves,
    multiply,
    prefetch,
    splat,
    store,
    subtract,
    take_ticket,
    total,
    transpose,
)
from engine.ops.cpu.memory import LINE
from engine.ops.cpu.store import half_value
from engine.ops.cpu.tile import TILE, mix_tile
from engine.ops.rows import Ints

Floats = npt.NDArray[np.float32]

QUERIES = 64
"""Query vectors (rows times heads that share a KV head) of one piece of work."""
ONE, ZERO, NOTHING = np.float32(1.0), np.float32(0.0), np.float32(-np.inf)
MIX = 4
"""Vectors of sixteen dimensions that the large mix tile covers."""

mix_4x4, mix_4x1, mix_1x4, mix_1x1 = mix_tile(TILE, MIX), mix_tile(TILE, 1), mix_tile(1, MIX), mix_tile(1, 1)


def padded(dim: int) -> int:
    """Elements of a head in scratch: whole vectors, the rest zero."""
    return -(-dim // LANES) * LANES


def scratch_elements(heads: Heads) -> int:
    """float32 elements of scratch that one thread needs."""
    queries = max(QUERIES, heads.heads // heads.kv_heads)
    return padded(queries * (2 * padded(heads.dim) + BLOCK_TOKENS + 2) + 3 * BLOCK_TOKENS * padded(heads.dim))


def pieces(spans: Ints, heads: Heads) -> Ints:
    """Spans [n, 3] cut into pieces of work, int64 [pieces, 4]: first row, rows, position of the first, span."""
    step = max(1, QUERIES // (heads.heads // heads.kv_heads))
    cut = [
        (first + at, min(step, count - at), start + at, span)
        for span, (first, count, start) in enumerate(spans.tolist())
        for at in range(0, count, step)
    ]
    return np.array(cut, np.int64)


@inner
def _places(at, queries, wide):  # type: ignore[no-untyped-def]
    """Where scores, keys, keys turned, values, peaks and masses lie in scratch from `at` on."""
    block = BLOCK_TOKENS * wide
    k = at + queries * BLOCK_TOKENS
    return at, k, k + block, k + 2 * block, k + 3 * block, k + 3 * block + queries


@inner
def _widen(memory, size, scales, half, block, ahead, head, count, wide, s, at):  # type: ignore[no-untyped-def]
    """`count` stored vectors as float32 [count, wide] to place `at` of scratch; those of block `ahead` are asked for.

    `memory` is the layer's K and V as bytes, `size` the bytes of an element, which name its type.
    """
    _, blocks, heads, _, vector = memory.shape
    dim = vector // size
    here = ((half * blocks + block) * heads + head) * BLOCK_TOKENS * vector
    there = ((half * blocks + ahead) * heads + head) * BLOCK_TOKENS * vector
    for t in range(count):
        for line in range(0, vector, LINE):
            prefetch(memory, there + t * vector + line)
        to = at + t * wide
        if size == 4:
            for d in range(0, dim, LANES):
                store(s, to + d, load_floats(memory, here + 4 * (t * dim + d)))
        elif size == 2:
            for d in range(0, dim, LANES):
                store(s, to + d, load_halves(memory, here + 2 * (t * dim + d)))
        else:
            scale = splat(half_value(scales[half, block, head, t]))
            for d in range(0, dim, LANES):
                store(s, to + d, multiply(load_codes(memory, here + t * dim + d), scale))
        for d in range(dim, wide):
            s[to + d] = ZERO


@inner
def _softmax(scratch, score, seen, peak, mass, acc, wide):  # type: ignore[no-untyped-def]
    """One query's scores of a block, of which it sees the first `seen`, become p; peak, mass and acc follow."""
    for t in range(seen, BLOCK_TOKENS):
        scratch[score + t] = NOTHING
    top = load(scratch, score)
    for t in range(LANES, BLOCK_TOKENS, LANES):
        top = larger(top, load(scratch, score + t))
    before = scratch[peak]
    now = max(before, greatest(top))
    added = splat(ZERO)
    for t in range(0, BLOCK_TOKENS, LANES):
        p = exponentials(subtract(load(scratch, score + t), splat(now)))
        store(scratch, score + t, p)
        added = add(added, p)
    factor = exponential(before - now)
    scratch[peak] = now
    scratch[mass] = scratch[mass] * factor + total(added)
    for d in range(0, wide, LANES):
        store(scratch, acc + d, multiply(load(scratch, acc + d), splat(factor)))


@inner
def _mix(s, p, p_step, v, count, out, width, first, last):  # type: ignore[no-untyped-def]
    """out[i] += sum over t < count of p[i, t] * v[t] for first <= i < last: out and v `width` wide, all within s."""
    i = first
    while i < last:
        large = i + TILE <= last
        a, o, d = p + i * p_step, out + i * width, 0
        while d < width:
            whole = d + MIX * LANES <= width
            if large and whole:
                mix_4x4(s, a, p_step, s, v + d, width, count, s, o + d, width)
            elif large:
                mix_4x1(s, a, p_step, s, v + d, width, count, s, o + d, width)
            elif whole:
                mix_1x4(s, a, p_step, s, v + d, width, count, s, o + d, width)
            else:
                mix_1x1(s, a, p_step, s, v + d, width, count, s, o + d, width)
            d += MIX * LANES if whole else LANES
        i += TILE if large else 1


@inner
def _begin(qkv, first_row, head, group, dim, queries, wide, s, q, acc, peaks, masses):  # type: ignore[no-untyped-def]
    root = ONE / np.sqrt(np.float32(dim))
    for i in range(queries):
        start = (head * group + i % group) * dim
        for d in range(wide):
            s[q + i * wide + d] = qkv[first_row + i // group, start + d] * root if d < dim else ZERO
            s[acc + i * wide + d] = ZERO
        s[peaks + i], s[masses + i] = NOTHING, ZERO


@inner
def _piece(qkv, first_row, rows, position, table, head, group, memory, size, scales, out, s):  # type: ignore[no-untyped-def]
    dim = memory.shape[4] // size
    wide, queries = (dim + LANES - 1) // LANES * LANES, rows * group
    q, acc = 0, queries * wide
    score, k, turned, v, peaks, masses = _places(acc + queries * wide, queries, wide)
    _begin(qkv, first_row, head, group, dim, queries, wide, s, q, acc, peaks, masses)
    last = position + rows - 1
    for b in range(last // BLOCK_TOKENS + 1):
        begin = b * BLOCK_TOKENS
        count = min(BLOCK_TOKENS, last + 1 - begin)
        ahead = table[min(b + 1, last // BLOCK_TOKENS)]
        _widen(memory, size, scales, 0, table[b], ahead, head, count, wide, s, k)
        _widen(memory, size, scales, 1, table[b], ahead, head, count, wide, s, v)
        for t in range(0, count, LANES):
            for d in range(0, wide, LANES):
                transpose(s, k + t * wide + d, wide, turned + d * BLOCK_TOKENS + t, BLOCK_TOKENS)
        first = max(0, begin - position) * group  # earlier rows end before this block
        for i in range(score + first * BLOCK_TOKENS, score + queries * BLOCK_TOKENS):
            s[i] = ZERO
        _mix(s, q, wide, turned, wide, score, BLOCK_TOKENS, first, queries)
        for i in range(first, queries):
            seen = min(count, position + i // group + 1 - begin)
            _softmax(s, score + i * BLOCK_TOKENS, seen, peaks + i, masses + i, acc + i * wide, wide)
        _mix(s, score, BLOCK_TOKENS, v, count, acc, wide, first, queries)
    for i in range(queries):
        start = (head * group + i % group) * dim
        for d in range(dim):
            out[first_row + i // group, start + d] = s[acc + i * wide + d] / s[masses + i]


@kernel(parallel=True)
def _attention(qkv, pieces, tables, group, memory, size, scales, out, scratch, counter):  # type: ignore[no-untyped-def]
    heads = memory.shape[2]
    work = len(pieces) * heads
    counter[0] = 0
    for t in numba.prange(len(scratch)):
        ticket = take_ticket(counter)
        while ticket < work:
            piece, head = pieces[len(pieces) - 1 - ticket // heads], ticket % heads
            first, rows, position, table = piece[0], piece[1], piece[2], tables[piece[3]]
            _piece(qkv, first, rows, position, table, head, group, memory, size, scales, out, scratch[t])
            ticket = take_ticket(counter)


def attention(
    qkv: Floats, heads: Heads, pieces: Ints, tables: Ints, kv: KvStorage, layer: int, out: Floats, scratch: Floats
) -> None:
    """qkv float32 [rows, (heads + 2 * kv heads) * dim], its K and V already stored; out float32 [rows, heads * dim].

    `pieces` from the function of that name, `tables` int64 [spans, blocks]; scratch float32 [threads,
    scratch_elements].
    """
    assert qkv.shape == (len(out), (heads.heads + 2 * heads.kv_heads) * heads.dim)
    assert out.shape[1] == heads.heads * heads.dim
    assert scratch.shape[1] >= scratch_elements(heads)
    group = heads.heads // heads.kv_heads
    memory, size, counter = kv.data[layer].view(np.uint8), kv.data.itemsize, np.empty(1, np.int64)
    _attention(qkv, pieces, tables, group, memory, size, kv.scales[layer], out, scratch, counter)
