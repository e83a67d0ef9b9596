"""RMS norm of rows, f32 to f16: the wrapper of rmsnorm.cu."""

import ctypes
from typing import Any

from engine.ops.cuda.compile import Unit
from engine.ops.cuda.launch import Array, Kernels, Pointer, address, optional, rows_of


class RmsnormArgs(ctypes.Structure):
    """`RmsnormArgs` of rmsnorm.cu."""

    _fields_ = (
        ("x", Pointer),
        ("weight", Pointer),
        ("y", Pointer),
        ("rows", Pointer),
        ("width", ctypes.c_int32),
        ("ldy", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


UNIT = Unit.of("rmsnorm.cu", {"ARGS_BYTES": ctypes.sizeof(RmsnormArgs)})


class Rmsnorm:
    def __init__(self, kernels: Kernels) -> None:
        self._kernel = kernels.load(UNIT)["rmsnorm"]

    def __call__(self, x: Array, weight: Array, eps: float, y: Array, stream: Any, rows: Array | None = None) -> None:
        """y f16 [m, >= width] from x f32 [*, width]: row i of y is of row i of x, or of row `rows`[i] (int32).

        Columns of y beyond width are not touched. Width is a multiple of 4. Raises ValueError.
        """
        m, width = int(y.shape[0]), int(x.shape[1])
        y_at, ldy = rows_of(y, "float16", m, width, "y")
        if width % 4 or ldy % 4:
            raise ValueError(f"rmsnorm: width {width} or row stride {ldy} is not a multiple of 4")
        args = RmsnormArgs(
            address(x, "float32", (None if rows is not None else m, width), "x"),
            address(weight, "float32", (width,), "weight"),
            y_at, optional(rows, "int32", (m,), "rows"), width, ldy, eps,
        )  # fmt: skip
        threads = min(1024, -(-width // 128) * 32)
        self._kernel.launch((m, 1, 1), threads, args, stream)
