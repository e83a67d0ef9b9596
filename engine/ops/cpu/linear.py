"""linear: out[m, n] = start + sum over k of x[m, k] * w[n, k], for one matrix or a stack of experts.

Weights lie as int8 codes with a float32 scale, perhaps offset, per 16 or 32, or as float32. One row of x streams the
codes through registers (bound by memory: they are asked for `AHEAD` bytes early, which doubles a core's bandwidth).
More rows unpack four rows of weights into a panel in the L1 cache and go over it in 4 × 4 tiles (bound by arithmetic).
Both ways give the same bits (tile.py), whatever the number of rows and the split over threads. Each thread owns a range
of weight rows.
"""

from dataclasses import dataclass
from typing import Self

import numba
import numpy as np
import numpy.typing as npt

from engine.ops.cpu.compiled import inner, kernel
from engine.ops.cpu.lanes import LANES, fma, load, load_codes, prefetch, splat, splat_at, store, total
from engine.ops.cpu.sharing import share
from engine.ops.cpu.tile import TILE, dot_tile

Floats = npt.NDArray[np.float32]

AHEAD = 6144
"""Bytes of codes between the one in use and the one asked for."""
SCALES_AHEAD = 192
"""The same for scales, in elements: one goes with 32 codes, or 16."""
BLOCK_ROWS = 128
"""Rows of x that share one unpacked panel before the next: they stay in the L2 cache."""

KEEP, CLEAR, BIAS = 0, 1, 2
PAIR = 2 * LANES
"""Codes taken at a time: a group of 32, or two of 16."""
HALF_SHIFT = 4
"""Binary logarithm of the smaller group."""
ZERO = np.float32(0.0)

NO_BIAS: Floats = np.empty(0, np.float32)

tile_4x4, tile_1x4, tile_1x1 = dot_tile(TILE, TILE), dot_tile(1, TILE), dot_tile(1, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One weight matrix or a stack of experts' as the kernels read it.

    Quantised: `codes` int8 [experts, rows, cols], `scales` and `offsets` float32 [experts, rows, cols / group]; where
    there are no offsets, that array is one zero and `offset_step` 0 instead of 1. Otherwise `values` float32
    [experts, rows, cols]. `bias` float32 [rows] or empty.
    """

    codes: npt.NDArray[np.int8] | None
    scales: Floats
    offsets: Floats
    offset_step: int
    group: int
    values: Floats | None
    bias: Floats

    @classmethod
    def quantised(
        cls, codes: npt.NDArray[np.int8], scales: Floats, offsets: Floats | None, group: int, bias: Floats = NO_BIAS
    ) -> Self:
        if offsets is None:
            return cls(codes, scales, np.zeros((1, 1, 1), np.float32), 0, group, None, bias)
        return cls(codes, scales, offsets, 1, group, None, bias)

    @classmethod
    def plain(cls, values: Floats, bias: Floats = NO_BIAS) -> Self:
        empty = np.empty((0, 0, 0), np.float32)
        return cls(None, empty, empty, 0, 0, values, bias)

    @property
    def shape(self) -> tuple[int, int, int]:
        array = self.codes if self.codes is not None else self.values
        assert array is not None
        return array.shape

    @property
    def shift(self) -> int:
        """Binary logarithm of the group."""
        return self.group.bit_length() - 1


@inner
def _begin(out, first_row, last_row, first, last, bias, start):  # type: ignore[no-untyped-def]
    if start == CLEAR:
        for m in range(first_row, last_row):
            for n in range(first, last):
                out[m, n] = 0.0
    elif start == BIAS:
        for m in range(first_row, last_row):
            for n in range(first, last):
                out[m, n] = bias[n]


@inner
def _tiles(x, m, last_row, w, b, cols, k, out, o, wide):  # type: ignore[no-untyped-def]
    """Rows m to last_row of x against the four rows (`wide`), or the one row, of w at place b."""
    x_step, out_step = x.shape[1], out.shape[1]
    if wide:
        while m + TILE <= last_row:
            tile_4x4(x, m * x_step, x_step, w, b, cols, k, out, m * out_step + o, out_step)
            m += TILE
        while m < last_row:
            tile_1x4(x, m * x_step, x_step, w, b, cols, k, out, m * out_step + o, out_step)
            m += 1
    else:
        while m < last_row:
            tile_1x1(x, m * x_step, x_step, w, b, cols, k, out, m * out_step + o, out_step)
            m += 1


@inner
def _ask_for_scales(scales, offsets, offset_step, group, count):  # type: ignore[no-untyped-def]
    for g in range(group + SCALES_AHEAD, group + SCALES_AHEAD + count, LANES):
        prefetch(scales, g)
        prefetch(offsets, g * offset_step)


@inner
def _unpack(codes, row, count, cols, scales, offsets, offset_step, shift, panel):  # type: ignore[no-untyped-def]
    """`count` rows of weights from `row` on into the panel [count, cols]."""
    groups = cols >> shift
    _ask_for_scales(scales, offsets, offset_step, row * groups, count * groups)
    c, g, p = row * cols, row * groups, 0
    for _ in range(count * cols // PAIR):
        prefetch(codes, c + AHEAD)
        scale, offset = splat_at(scales, g), splat_at(offsets, g * offset_step)
        store(panel, p, fma(load_codes(codes, c), scale, offset))
        g += 1
        if shift == HALF_SHIFT:  # the second half has a scale of its own
            scale, offset = splat_at(scales, g), splat_at(offsets, g * offset_step)
            g += 1
        store(panel, p + LANES, fma(load_codes(codes, c + LANES), scale, offset))
        c, p = c + PAIR, p + PAIR


@inner
def _stream(x, m, codes, row, cols, scales, offsets, offset_step, shift, out, o):  # type: ignore[no-untyped-def]
    """One row of x against four rows of weights, unpacked in registers."""
    groups = cols >> shift
    _ask_for_scales(scales, offsets, offset_step, row * groups, TILE * groups)
    c0, g0 = row * cols, row * groups
    c1, c2, c3 = c0 + cols, c0 + 2 * cols, c0 + 3 * cols
    g1, g2, g3 = g0 + groups, g0 + 2 * groups, g0 + 3 * groups
    a0 = a1 = a2 = a3 = splat(ZERO)
    for k in range(0, cols, PAIR):
        prefetch(codes, c0 + k + AHEAD)
        prefetch(codes, c1 + k + AHEAD)
        prefetch(codes, c2 + k + AHEAD)
        prefetch(codes, c3 + k + AHEAD)
        g = k >> shift
        s0, f0 = splat_at(scales, g0 + g), splat_at(offsets, (g0 + g) * offset_step)
        s1, f1 = splat_at(scales, g1 + g), splat_at(offsets, (g1 + g) * offset_step)
        s2, f2 = splat_at(scales, g2 + g), splat_at(offsets, (g2 + g) * offset_step)
        s3, f3 = splat_at(scales, g3 + g), splat_at(offsets, (g3 + g) * offset_step)
        values = load(x, m * x.shape[1] + k)
        a0 = fma(values, fma(load_codes(codes, c0 + k), s0, f0), a0)
        a1 = fma(values, fma(load_codes(codes, c1 + k), s1, f1), a1)
        a2 = fma(values, fma(load_codes(codes, c2 + k), s2, f2), a2)
        a3 = fma(values, fma(load_codes(codes, c3 + k), s3, f3), a3)
        if shift == HALF_SHIFT:
            g += 1
            s0, f0 = splat_at(scales, g0 + g), splat_at(offsets, (g0 + g) * offset_step)
            s1, f1 = splat_at(scales, g1 + g), splat_at(offsets, (g1 + g) * offset_step)
            s2, f2 = splat_at(scales, g2 + g), splat_at(offsets, (g2 + g) * offset_step)
            s3, f3 = splat_at(scales, g3 + g), splat_at(offsets, (g3 + g) * offset_step)
        values = load(x, m * x.shape[1] + k + LANES)
        a0 = fma(values, fma(load_codes(codes, c0 + k + LANES), s0, f0), a0)
        a1 = fma(values, fma(load_codes(codes, c1 + k + LANES), s1, f1), a1)
        a2 = fma(values, fma(load_codes(codes, c2 + k + LANES), s2, f2), a2)
        a3 = fma(values, fma(load_codes(codes, c3 + k + LANES), s3, f3), a3)
    out[m, o] += total(a0)
    out[m, o + 1] += total(a1)
    out[m, o + 2] += total(a2)
    out[m, o + 3] += total(a3)


@inner
def _codes_share(  # type: ignore[no-untyped-def]
    x, starts, codes, scales, offsets, offset_step, shift, bias, start, out, first, last, panel
):
    """Weight rows first to last of every expert, for the rows of x that are its own."""
    experts, rows, cols = codes.shape
    for e in range(experts):
        first_row, last_row = starts[e], starts[e + 1]
        _begin(out, first_row, last_row, first, last, bias, start)
        for m in range(first_row, last_row, BLOCK_ROWS):
            last_of_block = min(last_row, m + BLOCK_ROWS)
            n = first
            while n < last:
                row, wide = e * rows + n, n + TILE <= last
                count = TILE if wide else 1
                if wide and last_row - first_row == 1:
                    _stream(x, m, codes, row, cols, scales, offsets, offset_step, shift, out, n)
                else:
                    _unpack(codes, row, count, cols, scales, offsets, offset_step, shift, panel)
                    _tiles(x, m, last_of_block, panel, 0, cols, cols, out, n, wide)
                n += count


@inner
def _values_share(x, starts, values, bias, start, out, first, last):  # type: ignore[no-untyped-def]
    """As _codes_share for float32 weights; the columns after the last sixteen are added one by one."""
    experts, rows, cols = values.shape
    even = cols // LANES * LANES
    for e in range(experts):
        first_row, last_row = starts[e], starts[e + 1]
        _begin(out, first_row, last_row, first, last, bias, start)
        for block in range(first_row, last_row, BLOCK_ROWS):
            last_of_block = min(last_row, block + BLOCK_ROWS)
            n = first
            while n < last:
                wide = n + TILE <= last
                _tiles(x, block, last_of_block, values, (e * rows + n) * cols, cols, even, out, n, wide)
                n += TILE if wide else 1
        for m in range(first_row, last_row):
            for n in range(first, last):
                for k in range(even, cols):
                    out[m, n] += x[m, k] * values[e, n, k]


@kernel(parallel=True)
def _linear_codes(  # type: ignore[no-untyped-def]
    x, starts, codes, scales, offsets, offset_step, shift, bias, start, out, panels
):
    rows, threads = codes.shape[1], panels.shape[0]
    for t in numba.prange(threads):
        first, last = share(rows, t, threads, TILE), share(rows, t + 1, threads, TILE)
        _codes_share(x, starts, codes, scales, offsets, offset_step, shift, bias, start, out, first, last, panels[t])


@kernel(parallel=True)
def _linear_values(x, starts, values, bias, start, out, threads):  # type: ignore[no-untyped-def]
    rows = values.shape[1]
    for t in numba.prange(threads):
        _values_share(
            x, starts, values, bias, start, out, share(rows, t, threads, TILE), share(rows, t + 1, threads, TILE)
        )


def linear(
    x: Floats, starts: npt.NDArray[np.int64], matrix: Matrix, out: Floats, panels: Floats, *, onto: bool = False
) -> None:
    """out = x · matrix + bias, or out += x · matrix with `onto`.

    x float32 [rows, cols]; rows starts[e] to starts[e + 1] meet expert e, `starts` int64 [experts + 1]; out float32
    [rows, matrix rows]; panels float32 [threads, at least 4 * cols] is scratch.
    """
    _, rows, cols = matrix.shape
    assert x.shape[1] == cols
    assert out.shape == (len(x), rows)
    start = KEEP if onto else BIAS if len(matrix.bias) else CLEAR
    if matrix.codes is not None:
        scaling = matrix.scales, matrix.offsets, matrix.offset_step, matrix.shift
        _linear_codes(x, starts, matrix.codes, *scaling, matrix.bias, start, out, panels)
    else:
        _linear_values(x, starts, matrix.values, matrix.bias, start, out, len(panels))
