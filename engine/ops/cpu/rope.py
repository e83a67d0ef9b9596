"""rope: turn pairs (a, b) of Q and K by an angle: (a cos - b sin, a sin + b cos); angles: position * frequency."""

import math

import numba
import numpy as np
import numpy.typing as npt

from engine.ops.backend import Heads
from engine.ops.cpu.compiled import inner, kernel
from engine.ops.cpu.sharing import share, threads_for

Floats = npt.NDArray[np.float32]


@kernel()
def _angles(positions, frequencies, magnitude, cos, sin):  # type: ignore[no-untyped-def]
    for m in range(len(positions)):
        for i in range(len(frequencies)):
            angle = positions[m] * frequencies[i]
            cos[m, i] = math.cos(angle) * magnitude
            sin[m, i] = math.sin(angle) * magnitude


def angles(
    positions: npt.NDArray[np.int64], frequencies: npt.NDArray[np.float64], magnitude: float
) -> tuple[Floats, Floats]:
    """(cos, sin), each float32 [rows, frequencies], computed in float64."""
    cos = np.empty((len(positions), len(frequencies)), np.float32)
    sin = np.empty_like(cos)
    _angles(positions, frequencies, magnitude, cos, sin)
    return cos, sin


@inner
def _rows(qkv, heads, dim, cos, sin, interleaved, first, last):  # type: ignore[no-untyped-def]
    pairs = cos.shape[1]
    for m in range(first, last):
        for h in range(heads):
            start = h * dim
            if interleaved:
                for i in range(pairs):
                    a, b = qkv[m, start + 2 * i], qkv[m, start + 2 * i + 1]
                    qkv[m, start + 2 * i] = a * cos[m, i] - b * sin[m, i]
                    qkv[m, start + 2 * i + 1] = a * sin[m, i] + b * cos[m, i]
            else:
                for i in range(pairs):
                    a, b = qkv[m, start + i], qkv[m, start + pairs + i]
                    qkv[m, start + i] = a * cos[m, i] - b * sin[m, i]
                    qkv[m, start + pairs + i] = a * sin[m, i] + b * cos[m, i]


@kernel(parallel=True)
def _rope(qkv, heads, dim, cos, sin, interleaved, threads):  # type: ignore[no-untyped-def]
    if threads == 1:
        _rows(qkv, heads, dim, cos, sin, interleaved, 0, len(qkv))
    else:
        for t in numba.prange(threads):
            first, last = share(len(qkv), t, threads, 1), share(len(qkv), t + 1, threads, 1)
            _rows(qkv, heads, dim, cos, sin, interleaved, first, last)


def rope(qkv: Floats, heads: Heads, cos: Floats, sin: Floats, interleaved: bool, threads: int) -> None:
    """Q and K of qkv float32 [rows, (heads + 2 * kv heads) * dim] in place; cos and sin from `angles`."""
    assert qkv.shape == (len(cos), (heads.heads + 2 * heads.kv_heads) * heads.dim)
    turned = heads.heads + heads.kv_heads
    _rope(qkv, turned, heads.dim, cos, sin, interleaved, threads_for(len(qkv), threads))
