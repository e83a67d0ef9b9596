"""rmsnorm: out = x / sqrt(mean(x^2) + eps) * weight, over each row, or over each head within a row."""

import numba
import numpy as np
import numpy.typing as npt

from engine.ops.backend import Heads
from engine.ops.cpu.compiled import inner, kernel
from engine.ops.cpu.lanes import LANES, fma, load, multiply, splat, store, total
from engine.ops.cpu.sharing import share, threads_for

Floats = npt.NDArray[np.float32]
ONE = np.float32(1.0)


@inner
def _normalise(x, at, width, weight, eps, out, to):  # type: ignore[no-untyped-def]
    """`width` elements from flat place `at` of x to place `to` of out, which may be the same."""
    even = width // LANES * LANES
    squares = splat(np.float32(0.0))
    for i in range(0, even, LANES):
        values = load(x, at + i)
        squares = fma(values, values, squares)
    flat, result = x.reshape(x.size), out.reshape(out.size)
    mean = total(squares)
    for i in range(even, width):
        mean += flat[at + i] * flat[at + i]
    factor = ONE / np.sqrt(mean / np.float32(width) + eps)
    for i in range(0, even, LANES):
        store(out, to + i, multiply(multiply(load(x, at + i), splat(factor)), load(weight, i)))
    for i in range(even, width):
        result[to + i] = flat[at + i] * factor * weight[i]


@inner
def _rows(x, column, heads, weight, eps, out, first, last):  # type: ignore[no-untyped-def]
    width = len(weight)
    for m in range(first, last):
        for h in range(heads):
            at = column + h * width
            _normalise(x, m * x.shape[1] + at, width, weight, eps, out, m * out.shape[1] + at)


@kernel(parallel=True)
def _rmsnorm(x, column, heads, weight, eps, out, threads):  # type: ignore[no-untyped-def]
    if threads == 1:
        _rows(x, column, heads, weight, eps, out, 0, len(x))
    else:
        for t in numba.prange(threads):
            first, last = share(len(x), t, threads, 1), share(len(x), t + 1, threads, 1)
            _rows(x, column, heads, weight, eps, out, first, last)


def rmsnorm(x: Floats, weight: Floats, eps: float, out: Floats, threads: int) -> None:
    """x and out float32 [rows, width], weight float32 [width]."""
    assert x.shape == out.shape == (len(x), len(weight))
    _rmsnorm(x, 0, 1, weight, np.float32(eps), out, threads_for(len(x), threads))


def head_norm(qkv: Floats, heads: Heads, q_weight: Floats, k_weight: Floats, eps: float, threads: int) -> None:
    """Every head of Q and of K in qkv float32 [rows, (heads + 2 * kv heads) * dim], in place."""
    assert len(q_weight) == len(k_weight) == heads.dim
    threads = threads_for(len(qkv), threads)
    _rmsnorm(qkv, 0, heads.heads, q_weight, np.float32(eps), qkv, threads)
    _rmsnorm(qkv, heads.heads * heads.dim, heads.kv_heads, k_weight, np.float32(eps), qkv, threads)
