"""The integers inside GGUF blocks, taken apart and put together again without losing a bit.

`split` gives unsigned codes and the scales as stored; `join` is its exact inverse. Codes are numbered so that a
weight is scale * (code - bias), or scale * level[code], with the constants of layout.FORMATS. Block formats:
engine/gguf.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf import lattices
from engine.gguf.quants import QUANTS, QuantType
from engine.gguf.small_blocks import nibbles

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """Parts of blocks [n]; `d` and `dmin` are float16 bits, one each per block (MXFP4: `d` is the exponent byte)."""

    codes: Bytes
    """[n, 32] or [n, 256]"""
    d: Halves | Bytes
    dmin: Halves | None = None
    scales: Bytes | None = None
    """[n, 8] or [n, 16]; Q2_K: scale in the low, minimum in the high nibble."""
    minima: Bytes | None = None


def split(raw: Bytes, quant: QuantType) -> Fields:
    """Fields of the blocks in `raw` [nbytes]."""
    return _PARTS[quant][0](raw.view(QUANTS[quant].layout))


def join(fields: Fields, quant: QuantType) -> Bytes:
    """The bytes that `split` was given."""
    blocks = np.zeros(len(fields.codes), QUANTS[quant].layout)
    _PARTS[quant][1](fields, blocks)
    return blocks.view(np.uint8).reshape(-1)


def ored(values: Array, axis: int) -> Array:
    """All along `axis` joined by or."""
    reduce: Callable[..., Array] = np.bitwise_or.reduce
    return reduce(values, axis=axis)


def _half(values: Array) -> Halves:
    return np.ascontiguousarray(values).view(np.uint16)


def _pack_nibbles(codes: Array) -> Array:
    """[n, 2, k] nibbles to [n, k] bytes: low halves first."""
    packed: Array = codes[..., 0, :] | codes[..., 1, :] << 4
    return packed


def _pack_in_turn(values: Array) -> Array:
    """[n, 2k] nibbles to [n, k] bytes."""
    packed: Array = values[:, 0::2] | values[:, 1::2] << 4
    return packed


def _in_turn(packed: Array) -> Array:
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)


def _bits(packed: Array) -> Array:
    """[n, k] bytes to [n, 8, k]: plane j holds bit j."""
    return packed[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1


def _pack_bits(planes: Array) -> Array:
    return ored(planes << np.arange(8, dtype=np.uint8)[:, None], axis=1)


_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def _bit_pairs(packed: Array, run: int = 32) -> Array:
    """[n, 2 * run] bytes to [n, 2, 4, run]: four runs of two bits in each half."""
    return packed.reshape(-1, 2, 1, run) >> _PAIRS & 3


def _pack_bit_pairs(pairs: Array) -> Array:
    return ored(pairs << _PAIRS, axis=2).reshape(len(pairs), -1)


# Blocks of 32


def _split_nibbles(blocks: Array) -> Fields:
    names = blocks.dtype.names or ()
    d = blocks["e"].copy() if "e" in names else _half(blocks["d"])
    return Fields(nibbles(blocks["qs"]).reshape(-1, 32), d, _half(blocks["m"]) if "m" in names else None)


def _join_nibbles(fields: Fields, blocks: Array) -> None:
    blocks["qs"] = _pack_nibbles(fields.codes.reshape(-1, 2, 16) & 15)
    if "e" in (blocks.dtype.names or ()):
        blocks["e"] = fields.d
    else:
        blocks["d"] = fields.d.view(np.float16)
    if fields.dmin is not None:
        blocks["m"] = fields.dmin.view(np.float16)


def _split_five(blocks: Array) -> Fields:
    low = _split_nibbles(blocks)
    fifth = np.unpackbits(blocks["qh"], axis=1, bitorder="little")
    codes: Array = low.codes | fifth << 4
    return Fields(codes, low.d, low.dmin)


def _join_five(fields: Fields, blocks: Array) -> None:
    _join_nibbles(fields, blocks)
    blocks["qh"] = np.packbits(fields.codes >> 4, axis=1, bitorder="little")


def _split_q8_0(blocks: Array) -> Fields:
    codes: Array = np.ascontiguousarray(blocks["qs"]).view(np.uint8) ^ np.uint8(0x80)
    return Fields(codes, _half(blocks["d"]))


def _join_q8_0(fields: Fields, blocks: Array) -> None:
    blocks["qs"] = (fields.codes ^ 0x80).view(np.int8)
    blocks["d"] = fields.d.view(np.float16)


# Blocks of 256


def _split_q2_k(blocks: Array) -> Fields:
    codes = _bit_pairs(blocks["qs"]).reshape(-1, 256)
    return Fields(codes, _half(blocks["d"]), _half(blocks["dmin"]), blocks["scales"].copy())


def _join_q2_k(fields: Fields, blocks: Array) -> None:
    assert fields.dmin is not None
    blocks["qs"] = _pack_bit_pairs(fields.codes.reshape(-1, 2, 4, 32))
    blocks["scales"] = fields.scales
    blocks["d"], blocks["dmin"] = fields.d.view(np.float16), fields.dmin.view(np.float16)


def _split_q3_k(blocks: Array) -> Fields:
    codes = _bit_pairs(blocks["qs"]).reshape(-1, 8, 32) | _bits(blocks["hmask"]) << 2
    low = nibbles(blocks["scales"][:, :8]).reshape(-1, 16)
    high = (blocks["scales"][:, None, 8:] >> _PAIRS & 3).reshape(-1, 16)
    return Fields(codes.reshape(-1, 256), _half(blocks["d"]), scales=low | high << 4)


def _join_q3_k(fields: Fields, blocks: Array) -> None:
    assert fields.scales is not None
    codes = fields.codes.reshape(-1, 8, 32)
    blocks["qs"] = _pack_bit_pairs((codes & 3).reshape(-1, 2, 4, 32))
    blocks["hmask"] = _pack_bits(codes >> 2)
    blocks["scales"][:, :8] = _pack_nibbles((fields.scales & 15).reshape(-1, 2, 8))
    blocks["scales"][:, 8:] = ored((fields.scales >> 4).reshape(-1, 4, 4) << _PAIRS, axis=1)
    blocks["d"] = fields.d.view(np.float16)


def _split_q4_k(blocks: Array) -> Fields:
    first, second, nibble = np.split(blocks["scales"], 3, axis=1)
    scales = np.concatenate((first & 63, nibble & 15 | first >> 6 << 4), axis=1)
    minima = np.concatenate((second & 63, nibble >> 4 | second >> 6 << 4), axis=1)
    codes = nibbles(blocks["qs"].reshape(-1, 4, 32)).reshape(-1, 256)
    return Fields(codes, _half(blocks["d"]), _half(blocks["dmin"]), scales, minima)


def _join_q4_k(fields: Fields, blocks: Array) -> None:
    assert fields.scales is not None
    assert fields.minima is not None
    assert fields.dmin is not None
    scales, minima = fields.scales, fields.minima
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    blocks["scales"] = np.concatenate((first, second, scales[:, 4:] & 15 | minima[:, 4:] << 4), axis=1)
    blocks["qs"] = _pack_nibbles((fields.codes & 15).reshape(-1, 4, 2, 32)).reshape(-1, 128)
    blocks["d"], blocks["dmin"] = fields.d.view(np.float16), fields.dmin.view(np.float16)


def _split_q5_k(blocks: Array) -> Fields:
    low = _split_q4_k(blocks)
    codes: Array = low.codes | _bits(blocks["qh"]).reshape(-1, 256) << 4
    return Fields(codes, low.d, low.dmin, low.scales, low.minima)


def _join_q5_k(fields: Fields, blocks: Array) -> None:
    _join_q4_k(fields, blocks)
    blocks["qh"] = _pack_bits((fields.codes >> 4).reshape(-1, 8, 32))


def _split_q6_k(blocks: Array) -> Fields:
    low = nibbles(blocks["ql"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    codes = low | _bit_pairs(blocks["qh"]) << 4
    scales: Array = np.ascontiguousarray(blocks["scales"]).view(np.uint8) ^ np.uint8(0x80)
    return Fields(codes.reshape(-1, 256), _half(blocks["d"]), scales=scales)


def _join_q6_k(fields: Fields, blocks: Array) -> None:
    assert fields.scales is not None
    codes = fields.codes.reshape(-1, 2, 4, 32)
    blocks["ql"] = _pack_nibbles((codes & 15).reshape(-1, 2, 2, 64)).reshape(-1, 128)
    blocks["qh"] = _pack_bit_pairs(codes >> 4)
    blocks["scales"] = (fields.scales ^ 0x80).view(np.int8)
    blocks["d"] = fields.d.view(np.float16)


def _split_iq4_xs(blocks: Array) -> Fields:
    high = (blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    codes = nibbles(blocks["qs"].reshape(-1, 8, 16)).reshape(-1, 256)
    return Fields(codes, _half(blocks["d"]), scales=_in_turn(blocks["scales_l"]) | high << 4)


def _join_iq4_xs(fields: Fields, blocks: Array) -> None:
    assert fields.scales is not None
    blocks["qs"] = _pack_nibbles(fields.codes.reshape(-1, 8, 2, 16)).reshape(-1, 128)
    blocks["scales_l"] = _pack_in_turn(fields.scales & 15)
    high = (fields.scales >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    blocks["scales_h"] = ored(high, axis=1)
    blocks["d"] = fields.d.view(np.float16)


# Lattice types: the index of a point becomes the level of each weight; scales count in halves (1 + 2s).


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Points as level numbers [points, n], and the way back from `n` packed level numbers."""

    levels: Bytes
    """[levels], ascending magnitudes."""
    points: Bytes
    shifts: npt.NDArray[np.uint32]
    index: Halves

    @classmethod
    def of(cls, magnitudes: Array, bits: int) -> "Lattice":
        levels = np.unique(magnitudes)
        points = np.searchsorted(levels, magnitudes).astype(np.uint8)
        shifts = np.arange(points.shape[1], dtype=np.uint32) * np.uint32(bits)
        index = np.zeros(1 << bits * points.shape[1], np.uint16)
        index[cls._key(points, shifts)] = np.arange(len(points))
        return cls(levels.astype(np.uint8), points, shifts, index)

    @staticmethod
    def _key(points: Array, shifts: Array) -> Array:
        return ored(points.astype(np.uint32) << shifts, axis=-1)

    def find(self, points: Array) -> Halves:
        """Index of each point [..., n]."""
        return self.index[self._key(points, self.shifts)]


@cache
def lattice(quant: QuantType) -> Lattice:
    """The point table of IQ3_S, IQ3_XXS or IQ2_XS."""
    if quant is QuantType.IQ2_XS:
        return Lattice.of(lattices.iq2_xs_points(), 2)
    return Lattice.of(lattices.iq3_s_points() if quant is QuantType.IQ3_S else lattices.iq3_xxs_points(), 3)


def _minus(numbers: Array) -> Array:
    """1 where the sign is minus, [..., 8], for 7-bit sign numbers (the eighth makes the count even)."""
    return (lattices.signs()[numbers] < 0).astype(np.uint8)


def _sign_number(minus: Array) -> Array:
    return ored(minus[..., :7].astype(np.uint16) << np.arange(7, dtype=np.uint16), axis=-1)


def _split_iq3_s(blocks: Array) -> Fields:
    ninth = np.unpackbits(blocks["qh"], axis=1, bitorder="little").astype(np.uint16)
    magnitude = lattice(QuantType.IQ3_S).points[blocks["qs"] | ninth << 8].reshape(-1, 256)
    minus = np.unpackbits(blocks["signs"], axis=1, bitorder="little")
    codes = np.where(minus, 7 - magnitude, 8 + magnitude).astype(np.uint8)  # weight 2 * code - 15
    return Fields(codes, _half(blocks["d"]), scales=1 + 2 * _in_turn(blocks["scales"]))


def _join_iq3_s(fields: Fields, blocks: Array) -> None:
    assert fields.scales is not None
    minus = fields.codes < 8
    magnitude = np.where(minus, 7 - fields.codes, fields.codes - 8).astype(np.uint8)
    index = lattice(QuantType.IQ3_S).find(magnitude.reshape(-1, 64, 4))
    blocks["qs"], blocks["qh"] = index & 255, np.packbits(index >> 8, axis=1, bitorder="little")
    blocks["signs"] = np.packbits(minus, axis=1, bitorder="little")
    blocks["scales"] = _pack_in_turn(fields.scales >> 1)
    blocks["d"] = fields.d.view(np.float16)


_SIGN_SHIFTS = np.array([0, 7, 14, 21], np.uint32)


def _split_iq3_xxs(blocks: Array) -> Fields:
    words = np.ascontiguousarray(blocks["signs_and_scales"])
    minus = _minus(words[:, :, None] >> _SIGN_SHIFTS & 127).reshape(-1, 256)
    codes = lattice(QuantType.IQ3_XXS).points[blocks["qs"]].reshape(-1, 256) | minus << 3
    return Fields(codes, _half(blocks["d"]), scales=(1 + 2 * (words >> 28)).astype(np.uint8))


def _join_iq3_xxs(fields: Fields, blocks: Array) -> None:
    assert fields.scales is not None
    blocks["qs"] = lattice(QuantType.IQ3_XXS).find((fields.codes & 7).reshape(-1, 64, 4))
    signs = _sign_number(fields.codes.reshape(-1, 8, 4, 8) >> 3).astype(np.uint32) << _SIGN_SHIFTS
    blocks["signs_and_scales"] = ored(signs, axis=2) | (fields.scales >> 1).astype(np.uint32) << 28
    blocks["d"] = fields.d.view(np.float16)


def _split_iq2_xs(blocks: Array) -> Fields:
    points = lattice(QuantType.IQ2_XS).points[blocks["qs"] & 511].reshape(-1, 256)
    codes = points | _minus(blocks["qs"] >> 9).reshape(-1, 256) << 3
    return Fields(codes, _half(blocks["d"]), scales=1 + 2 * _in_turn(blocks["scales"]))


def _join_iq2_xs(fields: Fields, blocks: Array) -> None:
    assert fields.scales is not None
    codes = fields.codes.reshape(-1, 32, 8)
    blocks["qs"] = lattice(QuantType.IQ2_XS).find(codes & 3) | _sign_number(codes >> 3) << 9
    blocks["scales"] = _pack_in_turn(fields.scales >> 1)
    blocks["d"] = fields.d.view(np.float16)


_PARTS: dict[QuantType, tuple[Callable[[Array], Fields], Callable[[Fields, Array], None]]] = {
    QuantType.Q4_0: (_split_nibbles, _join_nibbles),
    QuantType.Q4_1: (_split_nibbles, _join_nibbles),
    QuantType.IQ4_NL: (_split_nibbles, _join_nibbles),
    QuantType.MXFP4: (_split_nibbles, _join_nibbles),
    QuantType.Q5_0: (_split_five, _join_five),
    QuantType.Q5_1: (_split_five, _join_five),
    QuantType.Q8_0: (_split_q8_0, _join_q8_0),
    QuantType.Q2_K: (_split_q2_k, _join_q2_k),
    QuantType.Q3_K: (_split_q3_k, _join_q3_k),
    QuantType.Q4_K: (_split_q4_k, _join_q4_k),
    QuantType.Q5_K: (_split_q5_k, _join_q5_k),
    QuantType.Q6_K: (_split_q6_k, _join_q6_k),
    QuantType.IQ4_XS: (_split_iq4_xs, _join_iq4_xs),
    QuantType.IQ3_S: (_split_iq3_s, _join_iq3_s),
    QuantType.IQ3_XXS: (_split_iq3_xxs, _join_iq3_xxs),
    QuantType.IQ2_XS: (_split_iq2_xs, _join_iq2_xs),
}
