"""Quantisation types of GGUF: one row each in QUANTS, and what turns their bytes into weights.

Every quantised type is scale * code + offset with a small integer code and one scale, sometimes one offset, per group
of 16 or 32 weights. `codes` gives these three as arrays, for the CPU kernels; `dequantise` multiplies them out in
float32 in the reference's order, which equals the `gguf` package to the bit.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf import lattice_blocks, small_blocks, super_blocks
from engine.gguf.small_blocks import Array, Blocks, Parts

_SLICE_ELEMENTS = 1 << 17
"""Weights unpacked at a time: temporaries stay within a core's cache."""


class QuantType(IntEnum):
    """Type numbers of ggml that this engine reads."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ4_NL = 20
    IQ3_S = 21
    IQ4_XS = 23
    BF16 = 30
    MXFP4 = 39


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """One quantisation type: `layout` is one block; `unpack` takes blocks [n] to (codes, scale, offset)."""

    block_elements: int
    layout: np.dtype[Any]
    group: int = 0
    """Weights that share a scale; 0 for the plain float types, which have no codes."""
    unpack: Callable[[Blocks], Parts] | None = None

    @property
    def block_bytes(self) -> int:
        return self.layout.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Weights as scale * code + offset: codes int8 [..., cols]; scale and offset float32 [..., cols / group]."""

    codes: npt.NDArray[np.int8]
    scale: npt.NDArray[np.float32]
    offset: npt.NDArray[np.float32] | None
    group: int


QUANTS: dict[QuantType, QuantSpec] = {
    QuantType.F32: QuantSpec(1, np.dtype("<f4")),
    QuantType.F16: QuantSpec(1, np.dtype("<f2")),
    QuantType.BF16: QuantSpec(1, np.dtype("<u2")),
    QuantType.Q8_0: QuantSpec(32, small_blocks.Q8_0, 32, small_blocks.q8_0),
    QuantType.Q4_0: QuantSpec(32, small_blocks.Q4_0, 32, small_blocks.q4_0),
    QuantType.Q4_1: QuantSpec(32, small_blocks.Q4_1, 32, small_blocks.q4_1),
    QuantType.Q5_0: QuantSpec(32, small_blocks.Q5_0, 32, small_blocks.q5_0),
    QuantType.Q5_1: QuantSpec(32, small_blocks.Q5_1, 32, small_blocks.q5_1),
    QuantType.IQ4_NL: QuantSpec(32, small_blocks.IQ4_NL, 32, small_blocks.iq4_nl),
    QuantType.MXFP4: QuantSpec(32, small_blocks.MXFP4, 32, small_blocks.mxfp4),
    QuantType.Q2_K: QuantSpec(256, super_blocks.Q2_K, 16, super_blocks.q2_k),
    QuantType.Q3_K: QuantSpec(256, super_blocks.Q3_K, 16, super_blocks.q3_k),
    QuantType.Q4_K: QuantSpec(256, super_blocks.Q4_K, 32, super_blocks.q4_k),
    QuantType.Q5_K: QuantSpec(256, super_blocks.Q5_K, 32, super_blocks.q5_k),
    QuantType.Q6_K: QuantSpec(256, super_blocks.Q6_K, 16, super_blocks.q6_k),
    QuantType.IQ4_XS: QuantSpec(256, lattice_blocks.IQ4_XS, 32, lattice_blocks.iq4_xs),
    QuantType.IQ3_S: QuantSpec(256, lattice_blocks.IQ3_S, 32, lattice_blocks.iq3_s),
    QuantType.IQ3_XXS: QuantSpec(256, lattice_blocks.IQ3_XXS, 32, lattice_blocks.iq3_xxs),
    QuantType.IQ2_XS: QuantSpec(256, lattice_blocks.IQ2_XS, 16, lattice_blocks.iq2_xs),
}

_NOT_READ = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 19: "IQ1_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def quant_name(number: int) -> str:
    """The name of ggml's type `number`, also of one that is not supported."""
    return QuantType(number).name if number in QUANTS else _NOT_READ.get(number, str(number))


def codes(raw: npt.NDArray[np.uint8], quant: QuantType, shape: tuple[int, ...]) -> Codes:
    """Unpack `raw` [nbytes] of a tensor of `shape` [..., cols] into integer codes.

    F32, F16 and BF16 have none: ask `dequantise`. Nothing is checked for NaN; GgufFile.codes does.
    """
    spec = QUANTS[quant]
    assert spec.group, f"{quant.name} has no codes"
    blocks, per_block = _blocks(raw, spec, shape), spec.block_elements // spec.group
    unpacked = np.empty((len(blocks), spec.block_elements), np.int8)
    scale = np.empty((len(blocks), per_block), np.float32)
    offset: Array | None = None
    for part, (block_codes, block_scale, block_offset) in _unpack_slices(spec, blocks):
        unpacked[part] = block_codes.reshape(-1, spec.block_elements).view(np.int8)
        scale[part] = block_scale
        if block_offset is not None:
            offset = np.empty_like(scale) if offset is None else offset
            offset[part] = block_offset
    groups = (*shape[:-1], shape[-1] // spec.group)
    return Codes(
        unpacked.reshape(shape), scale.reshape(groups), offset if offset is None else offset.reshape(groups), spec.group
    )


def dequantise(raw: npt.NDArray[np.uint8], quant: QuantType, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The weights of `raw` [nbytes] as float32 [*shape], equal to the `gguf` package to the bit."""
    spec = QUANTS[quant]
    blocks = _blocks(raw, spec, shape)
    if quant is QuantType.BF16:
        return (blocks.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if not spec.group:
        return blocks.astype(np.float32).reshape(shape)
    weights = np.empty((len(blocks), spec.block_elements // spec.group, spec.group), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale; GgufFile.dequantised names the tensor
        for part, (block_codes, scale, offset) in _unpack_slices(spec, blocks):
            np.multiply(scale[:, :, None], block_codes.reshape(weights[part].shape), out=weights[part])
            if offset is not None:
                weights[part] += offset[:, :, None]
    return weights.reshape(shape)


def _blocks(raw: npt.NDArray[np.uint8], spec: QuantSpec, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    assert shape[-1] % spec.block_elements == 0
    assert raw.nbytes == math.prod(shape) // spec.block_elements * spec.block_bytes
    return raw.view(spec.layout)


def _unpack_slices(spec: QuantSpec, blocks: Blocks) -> Iterator[tuple[slice, Parts]]:
    assert spec.unpack is not None
    step = _SLICE_ELEMENTS // spec.block_elements
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        with np.errstate(invalid="ignore", over="ignore"):
            parts = spec.unpack(blocks[part])
        yield part, parts
