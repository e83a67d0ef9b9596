"""The re-lay of weights on the device: the wrapper of relay.cu. layout.lay is its twin."""

import ctypes
from dataclasses import dataclass
from typing import Any, Self

import cupy as cp
import numpy as np

from engine.gguf.quants import QUANTS
from engine.ops.cuda.compile import Unit
from engine.ops.cuda.fields import lattice
from engine.ops.cuda.launch import Array, Kernels, Pointer, address
from engine.ops.cuda.layout import BF16, F32, Format, Numbers, Scales, numbers

_WARPS = 4


class RelayArgs(ctypes.Structure):
    """`RelayArgs` of relay.cu."""

    _fields_ = (
        ("raw", Pointer),
        ("records", Pointer),
        ("points", Pointer),
        ("extremes", Pointer),
        ("expert_bytes", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("records_along_k", ctypes.c_int32),
        ("tile_stride", ctypes.c_int32),
        ("tile_offset", ctypes.c_int32),
    )


def unit(form: Format) -> Unit:
    spec = QUANTS[form.quant]
    raw = {"RAW_NAME": int(form.quant), "BLOCK_K": spec.block_elements, "BLOCK_BYTES": spec.block_bytes}
    return Unit.of("relay.cu", form.defines() | raw | {"ARGS_BYTES": ctypes.sizeof(RelayArgs)})


@dataclass(frozen=True, slots=True, eq=False)
class Extremes:
    """What `numbers` needs, gathered on the device while matrices are re-laid: uint32 [2], zero at first."""

    bits: Array
    form: Format

    @classmethod
    def of(cls, form: Format) -> Self:
        return cls(cp.zeros(2, cp.uint32), form)

    def numbers(self) -> Numbers:
        """Waits for the device."""
        bits = cp.asnumpy(self.bits)
        if self.form.scales is Scales.E32:
            return numbers(self.form, float(bits[0]))
        if self.form.bits in (BF16, F32):
            shift = 16 if self.form.bits == BF16 else 0
            return numbers(self.form, float((bits[:1] << shift).view(np.float32)[0]))
        d, minimum = (float(value) for value in bits.astype(np.uint16).view(np.float16))
        return numbers(self.form, d, minimum * self.form.scale_limit)


class Relay:
    """The kernel for one format."""

    def __init__(self, kernels: Kernels, form: Format) -> None:
        self._form = form
        self._kernel = kernels.load(unit(form))["relay"]
        has_points = form.quant.name in ("IQ3_S", "IQ3_XXS", "IQ2_XS")
        self._points = cp.asarray(lattice(form.quant).points) if has_points else None

    def __call__(
        self,
        raw: Array,
        records: Array,
        rows: int,
        k: int,
        extremes: Extremes,
        stream: Any,
        *,
        member: int = 0,
        members: int = 1,
    ) -> None:
        """`raw` uint8 [nbytes], GGUF matrices [experts, rows, k], into `records` [experts, row tiles, records, bytes].

        Of `members` matrices whose row tiles alternate (gate and up), `raw` is number `member`. A part of a matrix
        may be given, with the records of its row tiles, if its rows are a multiple of 16. Raises ValueError.
        """
        tiles, along_k, size = self._form.shape(rows, k)
        experts = int(records.shape[0])
        spec = QUANTS[self._form.quant]
        raw_bytes = experts * rows * (k // spec.block_elements) * spec.block_bytes
        args = RelayArgs(
            address(raw, "uint8", (raw_bytes,), "raw"),
            address(records, "uint8", (experts, tiles * members, along_k, size), "records"),
            Pointer(None if self._points is None else self._points.data.ptr),
            address(extremes.bits, "uint32", (2,), "extremes"),
            records.strides[0], rows, k, along_k, members, member,
        )  # fmt: skip
        self._kernel.launch((-(-along_k * self._form.tiles // _WARPS), tiles, experts), _WARPS * 32, args, stream)
