"""One weight matrix on the device, re-laid, with the numbers that its kernels need."""

import ctypes
from dataclasses import dataclass, replace
from typing import Self

import cupy as cp
import numpy as np
import numpy.typing as npt

from engine.gguf.quants import QuantType
from engine.ops.cuda.launch import Array, Pointer, address
from engine.ops.cuda.layout import FORMATS, TILE_ROWS, Format, Numbers, greatest, lay, numbers
from engine.ops.cuda.split import Limits, segment_of

Raw = npt.NDArray[np.uint8]


class WeightsStruct(ctypes.Structure):
    """`Weights` of weights.cuh."""

    _fields_ = (
        ("data", Pointer),
        ("up", ctypes.c_float),
        ("down", ctypes.c_float),
        ("out", ctypes.c_float),
        ("factor0", ctypes.c_uint32),
        ("factor1", ctypes.c_uint32),
        ("factor1_high", ctypes.c_uint32),
        ("exponent", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("records", ctypes.c_int32),
        ("expert_bytes", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """Records of one matrix [rows, k], or of one for each expert.

    `gated`: two matrices of `rows` rows each, gate and up, whose row tiles alternate.
    """

    records: Array
    """uint8 [experts, row tiles, records along k, record bytes]"""
    form: Format
    numbers: Numbers
    rows: int
    k: int
    gated: bool
    segment: int
    """Records in one segment of k."""

    @classmethod
    def of(
        cls, records: Array, form: Format, numbers: Numbers, rows: int, k: int, limits: Limits, *, gated: bool = False
    ) -> Self:
        """`records` [experts, row tiles, records, bytes] is checked against the shape it must have."""
        tiles, along_k, size = form.shape(rows, k)
        address(records, "uint8", (None, tiles * (2 if gated else 1), along_k, size), "records")
        return cls(records, form, numbers, rows, k, gated, segment_of(along_k, limits))

    @property
    def struct(self) -> WeightsStruct:
        n = self.numbers
        return WeightsStruct(
            Pointer(self.records.data.ptr), n.up, n.down, n.out, n.factor0, n.factor1, n.factor1_high, n.exponent,
            self.rows, self.records.shape[2], self.records.strides[0],
        )  # fmt: skip

    def part(self, first: int, rows: int) -> "Weight":
        """Rows `first` (a multiple of 16) to `first + rows` of every expert."""
        assert not self.gated
        assert first % TILE_ROWS == 0
        tiles = slice(first // TILE_ROWS, -(-(first + rows) // TILE_ROWS))
        return replace(self, records=self.records[:, tiles], rows=rows)

    @property
    def k_padded(self) -> int:
        return int(self.records.shape[2]) * self.form.record_k

    @property
    def segments(self) -> int:
        return -(-int(self.records.shape[2]) // self.segment)

    @property
    def tiles(self) -> int:
        return int(self.records.shape[1])


def from_host(raw: list[Raw], quant: QuantType, rows: int, k: int, limits: Limits, *, gated: bool = False) -> Weight:
    """Re-lay GGUF bytes of matrices [rows, k] on the host and copy them to the current device.

    `raw` has one matrix per expert; gated: gate and up of each in turn. The way of tests and small tensors.
    """
    form, pair = FORMATS[quant], 2 if gated else 1
    laid = np.stack([lay(matrix, quant, rows, k) for matrix in raw])
    shape = len(raw) // pair, -1, *laid.shape[2:]
    records = laid.reshape(shape[0], pair, *laid.shape[1:]).swapaxes(1, 2).reshape(shape)
    extremes = [greatest(matrix, quant) for matrix in raw]
    found = numbers(form, max(d for d, _ in extremes), max(minimum for _, minimum in extremes))
    return Weight.of(cp.asarray(np.ascontiguousarray(records)), form, found, rows, k, limits, gated=gated)
