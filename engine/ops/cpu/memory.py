"""Arrays whose rows begin at cache lines: a 64-byte load that crosses one costs two."""

import math
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


def empty_rows(rows: int, cols: int) -> npt.NDArray[np.float32]:
    """float32 [rows, cols] for the result of an op; a few rows are not worth the alignment."""
    return np.empty((rows, cols), np.float32) if rows < 4 else aligned_empty((rows, cols))
