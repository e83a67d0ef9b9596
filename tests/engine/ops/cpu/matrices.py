"""Random weight matrices in the kernels' layout, with their float32 values for the twin."""

import numpy as np

from engine.ops.cpu.linear import Matrix
from engine.ops.cpu.memory import aligned_empty


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    array = aligned_empty(shape)
    array[:] = rng.normal(size=shape)
    return array


def quantised(rng: np.random.Generator, experts: int, rows: int, cols: int, group: int, offset: bool = True) -> Matrix:
    codes = aligned_empty((experts, rows, cols), np.int8)
    codes[:] = rng.integers(-128, 128, codes.shape)
    scales = random(rng, experts, rows, cols // group) / np.float32(64)
    return Matrix.quantised(codes, scales, random(rng, *scales.shape) if offset else None, group)


def plain(rng: np.random.Generator, experts: int, rows: int, cols: int) -> Matrix:
    return Matrix.plain(random(rng, experts, rows, cols))


def values(matrix: Matrix) -> np.ndarray:
    """float32 [experts, rows, cols]."""
    if matrix.codes is None:
        assert matrix.values is not None
        return matrix.values
    scaled = matrix.codes * np.repeat(matrix.scales, matrix.group, axis=2)
    return scaled + np.repeat(matrix.offsets, matrix.group, axis=2) if matrix.offset_step else scaled
