"""silu(gate) * up, f32 to f16: the wrapper of silu_mul.cu."""

import ctypes
from typing import Any

from engine.ops.cuda.compile import Unit
from engine.ops.cuda.launch import Array, Kernels, Pointer, address, rows_of


class SiluMulArgs(ctypes.Structure):
    """`SiluMulArgs` of silu_mul.cu."""

    _fields_ = (("gate_up", Pointer), ("y", Pointer), ("width", ctypes.c_int32), ("ldy", ctypes.c_int32))


UNIT = Unit.of("silu_mul.cu", {"ARGS_BYTES": ctypes.sizeof(SiluMulArgs)})
_THREADS = 256


class SiluMul:
    def __init__(self, kernels: Kernels) -> None:
        self._kernel = kernels.load(UNIT)["silu_mul"]

    def __call__(self, gate_up: Array, y: Array, stream: Any) -> None:
        """y f16 [m, >= width] from gate_up f32 [m, 2 * width]. Raises ValueError."""
        m, width = int(gate_up.shape[0]), int(gate_up.shape[1]) // 2
        y_at, ldy = rows_of(y, "float16", m, width, "y")
        args = SiluMulArgs(address(gate_up, "float32", (m, 2 * width), "gate_up"), y_at, width, ldy)
        self._kernel.launch((-(-width // _THREADS), m, 1), _THREADS, args, stream)
