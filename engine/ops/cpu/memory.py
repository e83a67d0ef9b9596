"""Arrays whose rows begin at cache lines: a 64-byte load that crosses one costs two."""

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

LINE = 64


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """As np.empty, with the first element at a multiple of 64 bytes."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size].view(kind).reshape(shape)


class Results:
    """Memory for the results of ops, taken again as soon as nobody holds the last result that was in it.

    Fresh memory would be paged in anew at every op, at more than a small op's own cost. A view refers to the array that
    owns the memory, so the count of references to that one says whether it is free, however its result was cut and
    passed on.
    """

    def __init__(self) -> None:
        self._owned: dict[int, list[npt.NDArray[np.float32]]] = {}
        self._idle = _holders([aligned_empty((1, 1))], 0)

    def take(self, rows: int, cols: int) -> npt.NDArray[np.float32]:
        """float32 [rows, cols], not cleared."""
        owned = self._owned.setdefault(cols, [])
        for place, array in enumerate(owned):
            if len(array) >= rows and _holders(owned, place) == self._idle:
                return array[:rows]
        owned[:] = [array for place, array in enumerate(owned) if _holders(owned, place) > self._idle]
        owned.append(aligned_empty((1 << (rows - 1).bit_length(), cols)))
        return owned[-1][:rows]


def _holders(arrays: list[npt.NDArray[np.float32]], place: int) -> int:
    return sys.getrefcount(arrays[place].base)
