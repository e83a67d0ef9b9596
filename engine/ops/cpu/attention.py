"""attention: out = softmax(Q Kᵀ / sqrt(dim)) V over each row's own and earlier positions, grouped heads, paged KV.

One piece of work is a few rows of one sequence and one KV head, with all query heads that share it. It walks the
sequence's blocks in order. K and V are read as they are stored, tokens of this very forward too: float32 in place, the
other types widened a block at a time. K is turned to [dim, token], so that scores need no sum over lanes. Then the
running softmax, with peak m and mass l so far:

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

mix_4x4, mix_4x1 = mix_tile(TILE, MIX), mix_tile(TILE, 1)


def padded(dim: int) -> int:
    """Elements of a head in scratch: whole vectors, the rest zero."""
    return -(-dim // LANES) * LANES


def scratch_elements(heads: Heads) -> int:
    """float32 elements of scratch that one thread needs."""
    queries = max(QUERIES, heads.heads // heads.kv_heads) + TILE
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
def _places(room, wide):  # type: ignore[no-untyped-def]
    """Where queries, results, scores, keys, keys turned, values, peaks and masses of `room` queries lie in scratch."""
    score, block = 2 * room * wide, BLOCK_TOKENS * wide
    k = score + room * BLOCK_TOKENS
    peaks = k + 3 * block
    return 0, room * wide, score, k, k + block, k + 2 * block, peaks, peaks + room


@inner
def _first_byte(memory, half, block, head):  # type: ignore[no-untyped-def]
    _, blocks, heads, tokens, vector = memory.shape
    return ((half * blocks + block) * heads + head) * tokens * vector


@inner
def _ask(memory, byte, size):  # type: ignore[no-untyped-def]
    for line in range(byte, byte + size, LINE):
        prefetch(memory, line)
    return byte + size


@inner
def _widen(memory, byte, size, scales, count, s, at, wide):  # type: ignore[no-untyped-def]
    """`count` vectors stored from `byte` on, of elements of `size` bytes, as float32 [count, wide] to place `at`."""
    vector = memory.shape[4]
    dim = vector // size
    for t in range(count):
        here, to = byte + t * vector, at + t * wide
        if size == 4:
            for d in range(0, dim, LANES):
                store(s, to + d, load_floats(memory, here + 4 * d))
        elif size == 2:
            for d in range(0, dim, LANES):
                store(s, to + d, load_halves(memory, here + 2 * d))
        else:
            scale = splat(half_value(scales[t]))
            for d in range(0, dim, LANES):
                store(s, to + d, multiply(load_codes(memory, here + d), scale))
        for d in range(dim, wide):
            s[to + d] = ZERO


@inner
def _turn(memory, byte, step, count, s, turned, wide, soon, later, share):  # type: ignore[no-untyped-def]
    """Vectors that lie `step` bytes apart, turned to [wide, 64]; meanwhile `share` bytes of `later` are asked for."""
    for t in range(0, count, LANES):
        for d in range(0, wide, LANES):
            soon = _ask(later, soon, share)
            transpose(memory, byte + t * step + 4 * d, step, s, turned + d * BLOCK_TOKENS + t, BLOCK_TOKENS)


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
def _mix(s, p, p_step, v, at, count, out, width, first, last):  # type: ignore[no-untyped-def]
    """out[i] += sum over t < count of p[i, t] * v[t] for first <= i < last; `width` wide, p and out within s.

    Only whole tiles: up to three rows after the last are computed too, and hold nothing.
    """
    for i in range(first, last, TILE):
        d = 0
        while d + MIX * LANES <= width:
            mix_4x4(s, p + i * p_step, p_step, v, at + d, width, count, s, out + i * width + d, width)
            d += MIX * LANES
        while d < width:
            mix_4x1(s, p + i * p_step, p_step, v, at + d, width, count, s, out + i * width + d, width)
            d += LANES


@inner
def _begin(qkv, first_row, head, group, dim, queries, room, wide, s, q, acc, peaks, masses):  # type: ignore[no-untyped-def]
    root = ONE / np.sqrt(np.float32(dim))
    for i in range(room * wide):
        s[q + i] = s[acc + i] = ZERO
    for i in range(queries):
        start = (head * group + i % group) * dim
        for d in range(dim):
            s[q + i * wide + d] = qkv[first_row + i // group, start + d] * root
        s[peaks + i], s[masses + i] = NOTHING, ZERO


@inner
def _piece(qkv, first_row, rows, position, table, head, group, memory, size, scales, out, s):  # type: ignore[no-untyped-def]
    dim, vector = memory.shape[4] // size, memory.shape[4]
    wide, queries = (dim + LANES - 1) // LANES * LANES, rows * group
    room = queries + TILE
    q, acc, score, k, turned, v, peaks, masses = _places(room, wide)
    direct = size == 4 and dim == wide  # K and V are read where they are stored
    floats, raw = memory.reshape(memory.size).view(np.float32), s.view(np.uint8)
    _begin(qkv, first_row, head, group, dim, queries, room, wide, s, q, acc, peaks, masses)
    last = position + rows - 1
    for b in range(last // BLOCK_TOKENS + 1):
        begin, block = b * BLOCK_TOKENS, table[b]
        count = min(BLOCK_TOKENS, last + 1 - begin)
        keys, values = _first_byte(memory, 0, block, head), _first_byte(memory, 1, block, head)
        # While this block is worked on the next one is fetched, a little at a time: in one go the core would wait.
        ahead = table[min(b + 1, last // BLOCK_TOKENS)]
        soon, later = _first_byte(memory, 0, ahead, head), _first_byte(memory, 1, ahead, head)
        share = vector * BLOCK_TOKENS // (wide * BLOCK_TOKENS // LANES // LANES)
        if direct:
            _turn(memory, keys, vector, count, s, turned, wide, soon, memory, share)
        else:
            _widen(memory, keys, size, scales[0, block, head], count, s, k, wide)
            _widen(memory, values, size, scales[1, block, head], count, s, v, wide)
            _turn(raw, 4 * k, 4 * wide, count, s, turned, wide, soon, memory, share)
        first = max(0, begin - position) * group  # earlier rows end before this block
        for i in range(score + first * BLOCK_TOKENS, score + room * BLOCK_TOKENS):
            s[i] = ZERO
        _mix(s, q, wide, s, turned, wide, score, BLOCK_TOKENS, first, queries)
        for i in range(first, queries):
            later = _ask(memory, later, vector * BLOCK_TOKENS // (queries - first))
            seen = min(count, position + i // group + 1 - begin)
            _softmax(s, score + i * BLOCK_TOKENS, seen, peaks + i, masses + i, acc + i * wide, wide)
        if direct:
            _mix(s, score, BLOCK_TOKENS, floats, values // 4, count, acc, wide, first, queries)
        else:
            _mix(s, score, BLOCK_TOKENS, s, v, count, acc, wide, first, queries)
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
