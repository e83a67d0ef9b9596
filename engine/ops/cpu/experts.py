"""experts: onto[m] += sum over a row's chosen experts of share * down[e] · silu_mul(gate_up[e] · x[m]).

Rows are brought into the order of their experts, so that each expert's weights are read once; a row's own sum runs over
its choices in their order, best first, whoever else is there.
"""

import numpy as np
import numpy.typing as npt

from engine.ops.cpu.compiled import kernel
from engine.ops.cpu.linear import Matrix, linear
from engine.ops.cpu.memory import Results
from engine.ops.cpu.silu_mul import silu_mul

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@kernel()
def _gather(x, order, used, out):  # type: ignore[no-untyped-def]
    for i in range(len(order)):
        for d in range(x.shape[1]):
            out[i, d] = x[order[i] // used, d]


@kernel()
def _combine(results, places, shares, onto):  # type: ignore[no-untyped-def]
    used = shares.shape[1]
    for m in range(len(onto)):
        for i in range(used):
            for d in range(onto.shape[1]):
                onto[m, d] += shares[m, i] * results[places[m * used + i], d]


def experts(
    x: Floats,
    chosen: Ints,
    shares: Floats,
    gate_up: Matrix,
    down: Matrix,
    onto: Floats,
    panels: Floats,
    results: Results,
) -> None:
    """x float32 [rows, hidden]; chosen int64 and shares float32 [rows, used]; onto float32 [rows, hidden].

    gate_up [experts, 2 * width, hidden], down [experts, hidden, width]; panels as for `linear`.
    """
    rows, used = chosen.shape
    flat = chosen.ravel()
    order = np.argsort(flat, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    starts = np.zeros(gate_up.shape[0] + 1, np.int64)
    np.cumsum(np.bincount(flat, minlength=gate_up.shape[0]), out=starts[1:])
    gathered, both = results.take(rows * used, x.shape[1]), results.take(rows * used, gate_up.shape[1])
    inside, outputs = results.take(rows * used, down.shape[2]), results.take(rows * used, down.shape[1])
    _gather(x, order, used, gathered)
    linear(gathered, starts, gate_up, both, panels)
    silu_mul(both, inside, len(panels))
    linear(inside, starts, down, outputs, panels)
    _combine(outputs, places, shares, onto)
