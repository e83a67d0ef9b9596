"""route: the experts of each row, best first, and their shares: softmax over all, the best `used` of it, perhaps
divided by their sum. Equal ones are taken in the experts' order."""

import numpy as np
import numpy.typing as npt

from engine.ops.cpu.compiled import kernel
from engine.ops.cpu.exponential import exponential

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@kernel()
def _route(logits, normalise, chosen, shares, odds):  # type: ignore[no-untyped-def]
    for m in range(len(logits)):
        peak = logits[m].max()
        mass = np.float32(0.0)
        for e in range(logits.shape[1]):
            odds[e] = exponential(logits[m, e] - peak)
            mass += odds[e]
        picked = np.float32(0.0)
        for i in range(chosen.shape[1]):
            best = 0
            for e in range(logits.shape[1]):
                if odds[e] > odds[best]:
                    best = e
            chosen[m, i], shares[m, i] = best, odds[best] / mass
            picked += shares[m, i]
            odds[best] = np.float32(-1.0)
        if normalise:
            for i in range(chosen.shape[1]):
                shares[m, i] /= picked


def route(logits: Floats, used: int, normalise: bool) -> tuple[Ints, Floats]:
    """logits float32 [rows, experts] -> (experts int64 [rows, used], shares float32 [rows, used])."""
    chosen, shares = np.empty((len(logits), used), np.int64), np.empty((len(logits), used), np.float32)
    _route(logits, normalise, chosen, shares, np.empty(logits.shape[1], np.float32))
    return chosen, shares
