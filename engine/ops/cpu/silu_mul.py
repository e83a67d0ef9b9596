"""silu_mul: out[m, f] = g / (1 + e^-g) * u, where row m of x holds width gates g, then width values u."""

import numba
import numpy as np
import numpy.typing as npt

from engine.ops.cpu.compiled import inner, kernel
from engine.ops.cpu.exponential import exponential, exponentials
from engine.ops.cpu.lanes import LANES, add, divide, load, multiply, splat, store, subtract
from engine.ops.cpu.sharing import share, threads_for

Floats = npt.NDArray[np.float32]
ONE, ZERO = np.float32(1.0), np.float32(0.0)


@inner
def _rows(x, out, first, last):  # type: ignore[no-untyped-def]
    width = out.shape[1]
    even = width // LANES * LANES
    for m in range(first, last):
        for f in range(0, even, LANES):
            gate, up = load(x, 2 * m * width + f), load(x, (2 * m + 1) * width + f)
            turned = exponentials(subtract(splat(ZERO), gate))
            store(out, m * width + f, multiply(divide(gate, add(splat(ONE), turned)), up))
        for f in range(even, width):
            gate = x[m, f]
            out[m, f] = gate / (ONE + exponential(ZERO - gate)) * x[m, width + f]


@kernel(parallel=True)
def _silu_mul(x, out, threads):  # type: ignore[no-untyped-def]
    if threads == 1:
        _rows(x, out, 0, len(out))
    else:
        for t in numba.prange(threads):
            _rows(x, out, share(len(out), t, threads, 1), share(len(out), t + 1, threads, 1))


def silu_mul(x: Floats, out: Floats, threads: int) -> None:
    """x float32 [rows, 2 * width] (gate, then up), out float32 [rows, width]."""
    assert x.shape == (len(out), 2 * out.shape[1])
    _silu_mul(x, out, threads_for(len(out), threads))
