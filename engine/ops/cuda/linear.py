"""y = x W^T over re-laid weights: the wrapper of linear.cu."""

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from engine.ops.cuda.compile import Unit
from engine.ops.cuda.launch import Array, Kernels, Pointer, address, optional, rows_of
from engine.ops.cuda.layout import Format
from engine.ops.cuda.split import (
    TILE_KERNEL,
    LaunchShape,
    balancing_shared,
    fewer_blocks,
    greatest_shared,
    launch_shape,
)
from engine.ops.cuda.weight import Weight, WeightsStruct


class Epilogue(IntEnum):
    """What becomes of a finished sum; the numbers are those of linear.cuh."""

    STORE_F32 = 0
    STORE_F16 = 1
    ADD_F32 = 2
    SILU_F16 = 3


class LinearArgs(ctypes.Structure):
    """`LinearArgs` of linear.cuh."""

    _fields_ = (
        ("w", WeightsStruct),
        ("x", Pointer),
        ("y", Pointer),
        ("bias", Pointer),
        ("items", Pointer),
        ("item_count", Pointer),
        ("x_rows", Pointer),
        ("y_rows", Pointer),
        ("m", ctypes.c_int32),
        ("ldx", ctypes.c_int32),
        ("ldy", ctypes.c_int32),
        ("segment", ctypes.c_int32),
        ("epilogue", ctypes.c_int32),
    )


def unit(form: Format) -> Unit:
    """The compilation of linear.cu for one format."""
    return Unit.of("linear.cu", form.defines() | {"ARGS_BYTES": ctypes.sizeof(LinearArgs)})


@dataclass(frozen=True, slots=True)
class Groups:
    """Work of an expert-grouped product, made on the device by route.cu; all int32.

    Rows of x and y are named by place; `x_rows` or `y_rows` None: the place itself is the row.
    """

    items: Array
    """[most, 4]: expert, first place, count, 0"""
    item_count: Array
    """[1]"""
    rows_of_item: int
    x_rows: Array | None
    y_rows: Array | None


class Linear:
    """All products over one format."""

    def __init__(self, kernels: Kernels, form: Format) -> None:
        self._form = form
        self._limits = kernels.limits
        self._kernels = kernels.load(unit(form))
        self._residents: dict[tuple[str, int], int] = {}
        for name, shared in greatest_shared(form, kernels.limits).items():
            self._kernels[name].allow_shared(max(shared, kernels.limits.multiprocessor_shared_bytes // 2))

    def __call__(
        self,
        w: Weight,
        x: Array,
        y: Array,
        stream: Any,
        epilogue: Epilogue = Epilogue.STORE_F32,
        *,
        bias: Array | None = None,
        groups: Groups | None = None,
    ) -> None:
        """y [m, rows] from x f16 [m, >= k in whole records], with zeros or any finite numbers beyond k.

        Grouped, x and y have the rows that `groups` names. SILU_F16 wants gated weights. Raises ValueError.
        """
        if w.form is not self._form or w.gated != (epilogue is Epilogue.SILU_F16):
            raise ValueError(f"{w.form.quant.name} weights, gated={w.gated}, do not go with {epilogue.name}")
        m = int(x.shape[0])
        half = epilogue in (Epilogue.STORE_F16, Epilogue.SILU_F16)
        x_at, ldx = rows_of(x, "float16", m, w.k_padded, "x")
        y_at, ldy = rows_of(y, "float16" if half else "float32", None if groups else m, w.rows, "y")
        if ldx % 8 or x.data.ptr % 16:
            raise ValueError(f"x: rows of {ldx} halves do not begin at multiples of 16 bytes")
        args = LinearArgs(
            w.struct, x_at, y_at, optional(bias, "float32", (w.rows,), "bias"),
            m=m, ldx=ldx, ldy=ldy, segment=w.segment, epilogue=epilogue,
        )  # fmt: skip
        if groups:
            args.items = address(groups.items, "int32", (None, 4), "items")
            args.item_count = address(groups.item_count, "int32", (1,), "item_count")
            args.x_rows = optional(groups.x_rows, "int32", (None,), "x_rows")
            args.y_rows = optional(groups.y_rows, "int32", (None,), "y_rows")
        shape = launch_shape(
            self._form, w.tiles, w.segments, m, self._limits, gated=w.gated,
            items=int(groups.items.shape[0]) if groups else 0, rows_of_item=groups.rows_of_item if groups else 0,
        )  # fmt: skip
        resident, grid = self._resident(shape), shape.grid
        if shape.kernel != TILE_KERNEL:
            grid = fewer_blocks(grid, resident * self._limits.multiprocessors)
        shared = max(shape.shared, balancing_shared(grid[0] * grid[1], resident, self._limits))
        self._kernels[shape.kernel].launch(grid, shape.threads, args, stream, shared)

    def _resident(self, shape: LaunchShape) -> int:
        """Blocks of this launch that one multiprocessor holds at a time; asked of the driver once."""
        key = shape.kernel, shape.threads
        if key not in self._residents:
            self._residents[key] = self._kernels[shape.kernel].resident(shape.threads, shape.shared)
        return self._residents[key]
