"""The NumPy twin: every op, slow and obvious, in float32. It is the oracle of both backends and makes no promise of
row invariance (`@` and einsum choose their own order)."""

import numpy as np
import numpy.typing as npt

from engine.config import BLOCK_TOKENS
from engine.gguf import GgufFile
from engine.kv_cache.storage import KvStorage
from engine.ops.backend import HeadNorm, Heads, Rope
from engine.ops.rows import Ints, Rows

Floats = npt.NDArray[np.float32]


def embed(tokens: Ints, table: Floats) -> Floats:
    """tokens [rows], table [vocab, hidden] -> [rows, hidden]."""
    return table[tokens]


def rmsnorm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x [..., width], weight [width]."""
    mean = np.mean(x * x, axis=-1, keepdims=True)
    result: Floats = x / np.sqrt(mean + np.float32(eps)) * weight
    return result


def linear(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:
    """x [rows, cols], weight [out, cols] -> [rows, out]."""
    product = x @ weight.T
    return product if bias is None else product + bias


def rope(x: Floats, positions: Ints, turn: Rope) -> Floats:
    """x [rows, heads, dim], its pairs turned by position * frequency."""
    angles = positions[:, None, None] * turn.frequencies
    cos = (np.cos(angles) * turn.magnitude).astype(np.float32)
    sin = (np.sin(angles) * turn.magnitude).astype(np.float32)
    pairs = len(turn.frequencies)
    result = x.copy()
    if turn.interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., first] * sin + x[..., second] * cos
    return result


def store(k: Floats, v: Floats, rows: Rows, kv: KvStorage, layer: int) -> None:
    """k and v [rows, kv heads, dim] into the blocks of their sequences."""
    blocks, tokens = rows.tables[rows.sequences, rows.positions // BLOCK_TOKENS], rows.positions % BLOCK_TOKENS
    for half, values in enumerate((k, v)):
        if kv.dtype == "int8":
            scales = (np.abs(values).max(axis=-1) / np.float32(127)).astype(np.float16)
            wide = scales.astype(np.float32)[..., None]
            codes = np.divide(values, wide, out=np.zeros_like(values), where=wide > 0)
            kv.scales[layer, half, blocks, :, tokens] = scales.view(np.uint16)
            kv.data[layer, half, blocks, :, tokens] = np.clip(np.rint(codes), -127, 127).astype(np.int8)
        elif kv.dtype == "f16":
            kv.data[layer, half, blocks, :, tokens] = values.astype(np.float16).view(np.uint16)
        else:
            kv.data[layer, half, blocks, :, tokens] = values


def stored(kv: KvStorage, layer: int, half: int, table: Ints, count: int) -> Floats:
    """K (half 0) or V (half 1) of a sequence's first `count` positions, as float32 [count, kv heads, dim]."""
    raw = kv.data[layer, half, table]
    if kv.dtype == "f16":
        values = raw.view(np.float16).astype(np.float32)
    elif kv.dtype == "int8":
        values = raw * kv.scales[layer, half, table].view(np.float16).astype(np.float32)[..., None]
    else:
        values = raw
    blocks, heads, tokens, dim = values.shape
    in_order: Floats = values.transpose(0, 2, 1, 3).reshape(blocks * tokens, heads, dim)[:count]
    return in_order


def attention(q: Floats, rows: Rows, kv: KvStorage, layer: int) -> Floats:
    """q [rows, heads, dim] against everything stored up to each row's position -> [rows, heads, dim]."""
    out = np.empty_like(q)
    for m, (position, sequence) in enumerate(zip(rows.positions, rows.sequences, strict=True)):
        k, v = (stored(kv, layer, half, rows.tables[sequence], position + 1) for half in (0, 1))
        repeat = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
        scores = np.einsum("hd,thd->ht", q[m], k) / np.sqrt(np.float32(q.shape[2]))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[m] = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    return out


def silu_mul(gate_up: Floats) -> Floats:
    """[rows, 2 * width] -> [rows, width]."""
    gate, up = np.split(gate_up, 2, axis=-1)
    with np.errstate(over="ignore"):
        result: Floats = gate / (1 + np.exp(-gate)) * up
    return result


def route(logits: Floats, used: int, normalise: bool) -> tuple[Ints, Floats]:
    """logits [rows, experts] -> (experts, shares), both [rows, used]."""
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    chosen = np.argsort(-odds, axis=1, kind="stable")[:, :used]
    shares = np.take_along_axis(odds, chosen, axis=1)
    return chosen, shares / shares.sum(axis=1, keepdims=True) if normalise else shares


def experts(x: Floats, chosen: Ints, shares: Floats, gate_up: Floats, down: Floats) -> Floats:
    """x [rows, hidden], gate_up [experts, 2 * width, hidden], down [experts, hidden, width] -> [rows, hidden]."""
    out = np.zeros_like(x)
    for m in range(len(x)):
        for expert, weight in zip(chosen[m], shares[m], strict=True):
            inside = silu_mul(linear(x[m : m + 1], gate_up[expert]))
            out[m] += weight * linear(inside, down[expert])[0]
    return out


class ReferenceWeights:
    """engine.ops.backend.Weights: a matrix is (float32 array, bias or None)."""

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf

    def vector(self, name: str) -> Floats:
        return self._gguf.dequantised(name)

    def numbers(self, name: str) -> Floats:
        return self._gguf.dequantised(name)

    def matrix(self, *names: str, bias: tuple[str, ...] = ()) -> tuple[Floats, Floats | None]:
        values = np.concatenate([self._gguf.dequantised(name) for name in names])
        return values, np.concatenate([self.vector(name) for name in bias]) if bias else None

    def gate_up(self, gate: str, up: str) -> tuple[Floats, None]:
        return np.concatenate([self._gguf.dequantised(name) for name in (gate, up)], axis=-2), None

    def experts(self, name: str) -> tuple[Floats, None]:
        return self._gguf.dequantised(name), None

    def as_head(self, table: tuple[Floats, None]) -> tuple[Floats, None]:
        return table


class ReferenceOps:
    """engine.ops.backend.Ops in plain NumPy; a step is (rows, rotary embedding)."""

    def __init__(self, kv: KvStorage) -> None:
        self.kv = kv

    def begin(self, rows: Rows, turn: Rope) -> tuple[Rows, Rope]:
        return rows, turn

    def embed(self, table: tuple[Floats, None], step: tuple[Rows, Rope]) -> Floats:
        return embed(step[0].tokens, table[0])

    def rmsnorm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        return rmsnorm(x, weight, eps)

    def linear(self, x: Floats, matrix: tuple[Floats, Floats | None], onto: Floats | None = None) -> Floats:
        product = linear(x, *matrix)
        return product if onto is None else onto + product

    def qkv(self, qkv: Floats, heads: Heads, norm: HeadNorm | None, layer: int, step: tuple[Rows, Rope]) -> Floats:
        q, k, v = split_heads(qkv, heads)
        if norm is not None:
            q, k = rmsnorm(q, norm.q_weight, norm.eps), rmsnorm(k, norm.k_weight, norm.eps)
        q, k = (rope(part, step[0].positions, step[1]) for part in (q, k))
        store(k, v, step[0], self.kv, layer)
        return q

    def attention(self, q: Floats, heads: Heads, layer: int, step: tuple[Rows, Rope]) -> Floats:
        return attention(q, step[0], self.kv, layer).reshape(len(q), -1)

    def swiglu(self, x: Floats, gate_up: tuple[Floats, None]) -> Floats:
        return silu_mul(linear(x, *gate_up))

    def route(self, logits: Floats, used: int, normalise: bool) -> tuple[Ints, Floats]:
        return route(logits, used, normalise)

    def experts(
        self,
        x: Floats,
        chosen: Ints,
        shares: Floats,
        gate_up: tuple[Floats, None],
        down: tuple[Floats, None],
        onto: Floats,
    ) -> Floats:
        return onto + experts(x, chosen, shares, gate_up[0], down[0])

    def take(self, x: Floats, places: Ints) -> Floats:
        return x[places]


def split_heads(qkv: Floats, heads: Heads) -> tuple[Floats, Floats, Floats]:
    """Views of Q [rows, heads, dim], K and V [rows, kv heads, dim] in qkv."""
    parts = qkv.reshape(len(qkv), -1, heads.dim)
    last = heads.heads + heads.kv_heads
    return parts[:, : heads.heads], parts[:, heads.heads : last], parts[:, last:]
