"""Weights as the CUDA kernels read them: the byte map of every quantisation, the way there and the bit-exact way back.

A matrix [rows, k] becomes records of 16 rows by 64 k (types with blocks of 32, plain floats) or 256 k (K and IQ
types), [row tiles, records along k, record bytes], so that one record is one aligned run of memory. In a record lie,
each for all its 64-k tiles: the codes in the order in which the lanes of a warp feed them to mma.m16n8k16, their high
bits where a code has 3, 5 or 6, the group scales row by row, and the block's float16 d (and dmin). Scales of six bits
become bytes; nothing is rounded. Within a tile, lane 4g + t holds rows g and g + 8 and of each 32 k the eight from 8t
on; weights.cuh reads it.

Rows are padded to 16 and k to whole records with zero scales, that is with zero weights. NumPy only: this is the twin
of the device's relay kernel.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf.quants import QUANTS, QuantType
from engine.gguf.small_blocks import FP4_LEVELS, NL_LEVELS
from engine.ops.cuda import fields as block_fields
from engine.ops.cuda.fields import Fields

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

TILE_ROWS = 16
TILE_K = 64
F16, BF16, F32 = 16, 17, 32
"""`bits` of the plain float types."""


class Scales(IntEnum):
    """How a record stores its scales; the numbers are those of weights.cuh."""

    NONE = 0
    D32 = 1
    DM32 = 2
    E32 = 3
    SUPER32 = 4
    SUPER16 = 5
    SUPER32_MIN = 6
    SUPER16_MIN = 7


_SCALE_BYTES = {Scales.NONE: 0, Scales.D32: 64, Scales.DM32: 128, Scales.E32: 32, Scales.SUPER32: 128,
                Scales.SUPER16: 256, Scales.SUPER32_MIN: 256, Scales.SUPER16_MIN: 256}  # fmt: skip
_D_BYTES = {Scales.SUPER32: 32, Scales.SUPER16: 32, Scales.SUPER32_MIN: 64, Scales.SUPER16_MIN: 64}


@dataclass(frozen=True, slots=True)
class Format:
    """One quantisation type on the device: weight = constant * d * (scale - scale_bias) * (code - bias), less
    minimum."""

    quant: QuantType
    bits: int
    scales: Scales
    bias: float = 0.0
    constant: float = 1.0
    scale_bias: int = 0
    scale_limit: int = 1
    """Greatest magnitude of an integer scale."""
    odd: bool = False
    """A stored code u stands for 2u + 1, so that a bias of half a step becomes a whole number."""
    levels: tuple[int, ...] = ()
    """Codes name these; stored as level + 128, which then is the code and 128 its bias."""

    @property
    def wide(self) -> bool:
        """Codes fill a byte, so that both rows of a lane have them at the same bits."""
        return self.bits == 8 or bool(self.levels)

    @property
    def tiles(self) -> int:
        """64-k tiles of a record."""
        return 4 if self.scales in _D_BYTES else 1

    @property
    def record_k(self) -> int:
        return TILE_K * self.tiles

    @property
    def high_at(self) -> int:
        """Where the second plane of codes begins."""
        return (
            self.tiles * {2: 256, 3: 256, 4: 512, 5: 512, 6: 512, 8: 1024, F16: 2048, BF16: 2048, F32: 4096}[self.bits]
        )

    @property
    def scales_at(self) -> int:
        return self.high_at + self.tiles * {3: 128, 5: 128, 6: 256}.get(self.bits, 0)

    @property
    def d_at(self) -> int:
        return self.scales_at + _SCALE_BYTES[self.scales]

    @property
    def record_bytes(self) -> int:
        return self.d_at + _D_BYTES.get(self.scales, 0)

    @property
    def scale_tile_bytes(self) -> int:
        """Scales of one 64-k tile as the kernels expand them in shared memory (weights.cuh)."""
        if self.scales is Scales.NONE:
            return 0
        runs = 4 if self.scales in (Scales.SUPER16, Scales.SUPER16_MIN) else 2
        return runs * 8 * (16 if self.scales in (Scales.DM32, Scales.SUPER32_MIN, Scales.SUPER16_MIN) else 8)

    def shape(self, rows: int, k: int) -> tuple[int, int, int]:
        """[row tiles, records along k, bytes] of a matrix [rows, k]."""
        return -(-rows // TILE_ROWS), -(-k // self.record_k), self.record_bytes

    def defines(self) -> dict[str, str]:
        """What weights.cuh must know."""
        values = {
            "FMT_BITS": self.bits, "FMT_LEVELS": int(bool(self.levels)), "FMT_SCALES": int(self.scales),
            "FMT_TILES": self.tiles, "FMT_BYTES": self.record_bytes, "FMT_HIGH_AT": self.high_at,
            "FMT_SCALES_AT": self.scales_at, "FMT_D_AT": self.d_at, "FMT_SCALE_BIAS": self.scale_bias,
            "FMT_ODD": int(self.odd),
        }  # fmt: skip
        if self.bias:  # offset over scale; rows g + 8 are met times 16
            low = -self.bias * 2.0**-24
            high = low if self.wide else low * 16
            values |= {"FMT_OFFSET_LOW": _half2_bits(low, low), "FMT_OFFSET_HIGH": _half2_bits(high, high)}
        if self.levels:
            words = (np.array(self.levels, np.int16) + 128).astype(np.uint8).view(np.uint32)
            values |= {f"FMT_LEVELS_{i}": int(word) for i, word in enumerate(words)}
        return {name: f"{value}u" if value >= 1 << 31 else str(value) for name, value in values.items()}


def _levels(quant: QuantType) -> tuple[int, ...]:
    magnitudes = [int(level) for level in block_fields.lattice(quant).levels]
    magnitudes += [0] * (8 - len(magnitudes))
    return (*magnitudes, *(-magnitude for magnitude in magnitudes))


def _formats() -> dict[QuantType, Format]:
    q, s = QuantType, Scales
    nl, fp4 = tuple(NL_LEVELS.tolist()), tuple(FP4_LEVELS.tolist())
    rows = (
        Format(q.F16, F16, s.NONE),
        Format(q.BF16, BF16, s.NONE),
        Format(q.F32, F32, s.NONE),
        Format(q.Q4_0, 4, s.D32, bias=8),
        Format(q.Q4_1, 4, s.DM32),
        Format(q.Q5_0, 5, s.D32, bias=16),
        Format(q.Q5_1, 5, s.DM32),
        Format(q.Q8_0, 8, s.D32, bias=128),
        Format(q.IQ4_NL, 4, s.D32, bias=128, levels=nl),
        Format(q.MXFP4, 4, s.E32, bias=128, levels=fp4),
        Format(q.Q2_K, 2, s.SUPER16_MIN, scale_limit=15),
        Format(q.Q3_K, 3, s.SUPER16, bias=4, scale_bias=32, scale_limit=32),
        Format(q.Q4_K, 4, s.SUPER32_MIN, scale_limit=63),
        Format(q.Q5_K, 5, s.SUPER32_MIN, scale_limit=63),
        Format(q.Q6_K, 6, s.SUPER16, bias=32, scale_bias=128, scale_limit=128),
        Format(q.IQ4_XS, 4, s.SUPER32, bias=128, scale_bias=32, scale_limit=32, levels=nl),
        Format(q.IQ3_S, 4, s.SUPER32, bias=16, scale_limit=31, odd=True),
        Format(q.IQ3_XXS, 4, s.SUPER32, bias=128, constant=0.25, scale_limit=31, levels=_levels(q.IQ3_XXS)),
        Format(q.IQ2_XS, 4, s.SUPER16, bias=128, constant=0.125, scale_limit=31, levels=_levels(q.IQ2_XS)),
    )
    return {row.quant: row for row in rows}


FORMATS = _formats()


@dataclass(frozen=True, slots=True)
class Numbers:
    """One matrix's exponent p as the kernels want it: weights reach the tensor cores as weight * 2^-p."""

    up: float
    down: float
    out: float
    factor0: int
    factor1: int
    factor1_high: int
    exponent: int


def numbers(form: Format, greatest_d: float, greatest_minimum: float = 0.0) -> Numbers:
    """p from the greatest |d| (MXFP4: exponent byte; plain floats: weight) and |minimum| of a matrix.

    The f16 operand scale * 2^(24-p) must stay finite, so p = log2(greatest scale) + 9 at least; floats aim at 16.
    """
    if form.scales is Scales.NONE:
        p = 0 if form.bits == F16 else _ceil_log2(greatest_d) - 4
        return Numbers(1.0, 2.0**-p, 2.0**p, 0, 0, 0, 0)
    greatest = 2.0 ** (greatest_d - 128) if form.scales is Scales.E32 else greatest_d * form.scale_limit * form.constant
    p = max(-6, _ceil_log2(greatest) + 9, _ceil_log2(greatest_minimum) - 12)
    first = max(min(15, 24 - p), 0)
    second, high = 24 - p - first, 0 if form.wide else 4
    down = 2.0**-p
    if form.scales is Scales.DM32:
        pairs = (2.0**first, down), (2.0**second, 1.0), (2.0 ** (second - high), 1.0)
    else:
        pairs = (2.0**first,) * 2, (2.0**second,) * 2, (2.0 ** (second - high),) * 2
    factor0, factor1, factor1_high = (_half2_bits(*pair) for pair in pairs)
    return Numbers(form.constant * 2.0 ** (24 - p), down, 2.0**p, factor0, factor1, factor1_high, -89 - p)


def lay(raw: Bytes, quant: QuantType, rows: int, k: int) -> Bytes:
    """Bytes of a GGUF matrix [rows, k] to records [row tiles, records, record bytes]."""
    form = FORMATS[quant]
    tiles, records, _ = form.shape(rows, k)
    if form.scales is Scales.NONE:
        weights = np.zeros((tiles * TILE_ROWS, records * TILE_K), QUANTS[quant].layout)
        weights[:rows, :k] = raw.view(QUANTS[quant].layout).reshape(rows, k)
        return _lay_floats(weights)
    out = np.zeros(form.shape(rows, k), np.uint8)
    per_block = QUANTS[quant].block_elements
    parts = block_fields.split(raw, quant)
    shape = rows, k // per_block, tiles * TILE_ROWS, records * form.record_k // per_block
    codes = _padded(parts.codes, *shape).reshape(tiles * TILE_ROWS, -1)
    lanes = _to_lanes(codes)
    _put_codes(out, form, lanes)
    _put_scales(out, form, parts, shape)
    return out


def unlay(records: Bytes, quant: QuantType, rows: int, k: int) -> Bytes:
    """The bytes that `lay` was given."""
    form = FORMATS[quant]
    if form.scales is Scales.NONE:
        weights = _unlay_floats(records, QUANTS[quant].layout)[:rows, :k]
        return np.ascontiguousarray(weights).view(np.uint8).reshape(-1)
    codes = _from_lanes(_take_codes(records, form))[:rows, :k]
    codes = np.ascontiguousarray(codes).reshape(-1, QUANTS[quant].block_elements)
    return block_fields.join(_take_scales(records, form, codes, rows, k), quant)


def greatest(raw: Bytes, quant: QuantType) -> tuple[float, float]:
    """(greatest |d|, greatest |minimum|) of a matrix, the arguments of `numbers`."""
    form, blocks = FORMATS[quant], raw.view(QUANTS[quant].layout)
    if quant is QuantType.BF16:
        return float(np.abs((blocks.astype(np.uint32) << 16).view(np.float32)).max()), 0.0
    if form.scales is Scales.NONE:
        return float(np.abs(blocks).max()), 0.0
    if form.scales is Scales.E32:
        return float(blocks["e"].max()), 0.0
    names = blocks.dtype.names or ()
    minimum = next((float(np.abs(blocks[n]).max()) * (form.scale_limit) for n in ("dmin", "m") if n in names), 0.0)
    return float(np.abs(blocks["d"]).max()), minimum


def _ceil_log2(value: float) -> int:
    return math.ceil(math.log2(value)) if value > 0 else -100


def _half2_bits(low: float, high: float) -> int:
    pair = np.array([low, high], np.float16)
    assert np.array_equal(pair.astype(np.float64), [low, high]), (low, high)
    return int(pair.view(np.uint32)[0])


def _padded(blocks: Array, rows: int, columns: int, padded_rows: int, padded_columns: int) -> Array:
    """[rows * columns, ...] to [padded_rows, padded_columns, ...] with zeros."""
    out = np.zeros((padded_rows, padded_columns, *blocks.shape[1:]), blocks.dtype)
    out[:rows, :columns] = blocks.reshape(rows, columns, *blocks.shape[1:])
    return out


def _to_lanes(codes: Array) -> Array:
    """[rows, k] to [row tiles, 64-k tiles, lane, half, step, row half, 4]: the order of weights.cuh."""
    c = codes.reshape(len(codes) // TILE_ROWS, 2, 8, -1, 2, 4, 2, 4)  # tile, row half, g, k tile, half, t, step, i
    return c.transpose(0, 3, 2, 5, 4, 6, 1, 7).reshape(c.shape[0], c.shape[3], 32, 2, 2, 2, 4)


def _from_lanes(lanes: Array) -> Array:
    tiles, k_tiles = lanes.shape[:2]
    c = lanes.reshape(tiles, k_tiles, 8, 4, 2, 2, 2, 4)
    return c.transpose(0, 6, 2, 1, 4, 3, 5, 7).reshape(tiles * TILE_ROWS, k_tiles * TILE_K)


_STEP, _ROW, _I = (np.arange(n, dtype=np.uint32) for n in (2, 2, 4))
_FOUR = 4 * _ROW[:, None] + 16 * (_I & 1) + 8 * (_I >> 1)
"""Bit of a 4-bit code by (row half, i) in the word of one step."""
_FOUR_LEVELS = 16 * _ROW[:, None] + 4 * _I
_TWO = 8 * _STEP[:, None, None] + 4 * _ROW[:, None] + 16 * (_I & 1) + 2 * (_I >> 1)
"""Bit of a 2-bit field by (step, row half, i) in the word of one half."""
_HALF = np.arange(2, dtype=np.uint32)[:, None, None, None]
_ONE = 8 * _HALF + 2 * _STEP[:, None, None] + (_I >> 1) + 4 * _ROW[:, None] + 16 * (_I & 1)
"""Bit of a 1-bit field by (half, step, row half, i) in the word of one tile."""


def _planes(form: Format) -> list[tuple[int, int, int, Array, int]]:
    """(place in the record, lowest bit, bits, bit places in the word, axes a word spans) of each plane of codes."""
    four = _FOUR_LEVELS if form.levels else _FOUR
    low = {2: (2, _TWO, 3), 3: (2, _TWO, 3), 4: (4, four, 2), 5: (4, _FOUR, 2), 6: (4, _FOUR, 2)}[form.bits]
    planes = [(0, 0, *low)]
    if form.bits in (3, 5):
        planes.append((form.high_at, form.bits - 1, 1, _ONE, 4))
    elif form.bits == 6:
        planes.append((form.high_at, 4, 2, _TWO, 3))
    return planes


def _put_codes(out: Bytes, form: Format, lanes: Array) -> None:
    if form.bits == 8:  # [half][lane][step][row half][4] bytes
        _region(out, form, 0, form.high_at)[:] = _split_tiles(lanes.transpose(0, 1, 3, 2, 4, 5, 6), form)
        return
    for at, first, bits, places, axes in _planes(form):
        values = (lanes >> first & (1 << bits) - 1).astype(np.uint32) << places
        words = block_fields.ored(values.reshape(*values.shape[: 7 - axes], -1), axis=-1)
        plane = _split_tiles(words.view(np.uint8), form)
        _region(out, form, at, plane.shape[-1])[:] = plane


def _take_codes(records: Bytes, form: Format) -> Array:
    tiles, count = records.shape[0], records.shape[1] * form.tiles
    if form.bits == 8:
        codes = np.ascontiguousarray(records[..., : form.high_at]).reshape(tiles, count, 2, 32, 2, 2, 4)
        return codes.transpose(0, 1, 3, 2, 4, 5, 6)
    codes = np.zeros((tiles, count, 32, 2, 2, 2, 4), np.uint8)
    for at, first, bits, places, axes in _planes(form):
        span = codes.shape[2 : 7 - axes]
        plane = np.ascontiguousarray(records[..., at : at + form.tiles * 4 * math.prod(span)])
        words = plane.view(np.uint32).reshape(tiles, count, *span, *[1] * axes)
        codes |= ((words >> places & (1 << bits) - 1) << first).astype(np.uint8)
    return codes


def _split_tiles(values: Array, form: Format) -> Array:
    """[row tiles, 64-k tiles, ...] bytes to [row tiles, records, bytes]."""
    return values.reshape(values.shape[0], values.shape[1] // form.tiles, -1)


def _region(out: Bytes, form: Format, at: int, size: int) -> Bytes:
    return out[..., at : at + size]


def _put_scales(out: Bytes, form: Format, parts: Fields, shape: tuple[int, int, int, int]) -> None:
    """Scales are [row tile][record][16 rows][...] in every form."""

    def by_row(values: Array) -> Array:
        padded = _padded(values, *shape).reshape(out.shape[0], TILE_ROWS, out.shape[1], -1)
        return np.ascontiguousarray(padded.transpose(0, 2, 1, 3))

    d = by_row(parts.d)
    if parts.dmin is not None:
        d = np.stack((d, by_row(parts.dmin)), axis=-1)
    d_at = form.d_at if form.scales in _D_BYTES else form.scales_at
    d_bytes = d.reshape(*out.shape[:2], -1).view(np.uint8)
    _region(out, form, d_at, d_bytes.shape[-1])[:] = d_bytes
    if parts.scales is not None:
        scales = by_row(parts.scales)
        if parts.minima is not None:
            scales = np.stack((scales, by_row(parts.minima)), axis=-1)
        _region(out, form, form.scales_at, _SCALE_BYTES[form.scales])[:] = scales.reshape(*out.shape[:2], -1)


def _take_scales(records: Bytes, form: Format, codes: Bytes, rows: int, k: int) -> Fields:
    blocks = k // codes.shape[1]

    def by_block(values: Array) -> Array:
        """[row tiles, records, 16, blocks of a record, ...] to [blocks, ...]."""
        v = values.transpose(0, 2, 1, *range(3, values.ndim))
        v = v.reshape(len(v) * TILE_ROWS, -1, *values.shape[4:])[:rows, :blocks]
        return np.ascontiguousarray(v).reshape(rows * blocks, *values.shape[4:])

    head = (*records.shape[:2], TILE_ROWS, 1 if form.scales in _D_BYTES else 2)
    at, size = form.scales_at, _SCALE_BYTES[form.scales]
    if form.scales in _D_BYTES:
        at, size = form.d_at, _D_BYTES[form.scales]
    stored = np.ascontiguousarray(records[..., at : at + size])
    d = by_block((stored if form.scales is Scales.E32 else stored.view(np.uint16)).reshape(*head, -1))
    fields = [np.ascontiguousarray(d[:, i]) for i in range(d.shape[1])]
    scales: list[Bytes] = []
    if form.scales in _D_BYTES:
        taken = np.ascontiguousarray(records[..., form.scales_at : form.scales_at + _SCALE_BYTES[form.scales]])
        pairs = 2 if form.scales is Scales.SUPER32_MIN else 1
        grouped = by_block(taken.reshape(*head, -1, pairs))
        scales = [np.ascontiguousarray(grouped[..., i]) for i in range(pairs)]
    return Fields(codes, fields[0], fields[1] if len(fields) > 1 else None, *scales)


def _lay_floats(weights: Array) -> Bytes:
    """[rows, k] to [half][row half][lane] runs of eight; F32: [half][row half][step][lane] runs of four."""
    lanes = _to_lanes(weights)  # tile, k tile, lane, half, step, row half, i
    order = (0, 1, 3, 5, 4, 2, 6) if weights.itemsize == 4 else (0, 1, 3, 5, 2, 4, 6)
    laid = np.ascontiguousarray(lanes.transpose(order))
    return laid.reshape(*laid.shape[:2], -1).view(np.uint8)


def _unlay_floats(records: Bytes, dtype: np.dtype[Any]) -> Array:
    values = records.view(dtype)
    if dtype.itemsize == 4:
        lanes = values.reshape(*records.shape[:2], 2, 2, 2, 32, 4).transpose(0, 1, 5, 2, 4, 3, 6)
    else:
        lanes = values.reshape(*records.shape[:2], 2, 2, 32, 2, 4).transpose(0, 1, 4, 2, 5, 3, 6)
    return _from_lanes(lanes)
