"""The order of sums and the choice of kernels, without a GPU."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gguf.quants import QuantType
from engine.ops.cuda.layout import FORMATS
from engine.ops.cuda.split import (
    MAX_SPLIT,
    SMALL_SPLIT,
    TILE_KERNEL,
    Limits,
    balancing_shared,
    fewer_blocks,
    greatest_shared,
    item_rows,
    launch_shape,
    segment_of,
)

H200 = Limits(132, 227 << 10, 228 << 10)
SMALL = Limits(36, 99 << 10, 100 << 10)
"""Compute capability 12.0: a 5060 Ti."""


@given(st.integers(1, 2000))
def test_segments_cover_k_and_none_is_empty(records: int) -> None:
    for limits, most in ((H200, MAX_SPLIT), (SMALL, SMALL_SPLIT)):
        segment = segment_of(records, limits)
        segments = -(-records // segment)
        assert 1 <= segments <= most
        assert (segments - 1) * segment < records
        assert segment == 1 or -(-records // (segment - 1)) > most, "the longest segment could be shorter"


@pytest.mark.parametrize("limits", [H200, SMALL])
def test_every_launch_fits_a_block_and_its_permission(limits: Limits) -> None:
    for form, m, gated, tiles in itertools.product(
        FORMATS.values(), (1, 8, 9, 17, 33, 64, 65, 256, 4096), (False, True), (2, 100, 264, 10000)
    ):
        allowed = greatest_shared(form, limits)
        for items, rows_of_item in ((0, 0), (9, 8), (9, 64)):
            shape = launch_shape(
                form, tiles, limits.max_split, m, limits, gated=gated, items=items, rows_of_item=rows_of_item
            )
            assert shape.shared <= allowed[shape.kernel] <= limits.shared_bytes
            assert shape.threads <= 32 * MAX_SPLIT


@given(st.integers(1, 4096), st.integers(1, 600))
def test_every_row_and_tile_is_computed(m: int, tiles: int) -> None:
    shape = launch_shape(FORMATS[QuantType.Q4_K], tiles, 8, m, H200, gated=False)
    if shape.kernel == TILE_KERNEL:
        assert shape.grid == (-(-tiles // 8), -(-m // 64), 1)
    else:
        tokens, row_tiles = (int(part) for part in shape.kernel.split("_")[2:])
        assert shape.grid == (-(-tiles // row_tiles), -(-m // (8 * tokens)), 1)
        groups, items, _ = fewer_blocks(shape.grid, 264)
        assert 1 <= groups <= shape.grid[0]
        assert items == shape.grid[1]


def test_a_small_launch_is_spread_evenly() -> None:
    """256 blocks over 132 multiprocessors: two on each, though three would fit; 300: no more than fit anyway."""
    shared = balancing_shared(256, 3, H200)
    assert shared > 0
    assert H200.multiprocessor_shared_bytes // shared == 3
    assert H200.multiprocessor_shared_bytes // (shared + 1024) == 2
    assert balancing_shared(300, 3, H200) == 0
    assert balancing_shared(300, 2, H200) == 0


def test_experts_with_many_rows_take_the_wide_kernel() -> None:
    assert item_rows(1, 8, 128) == 8
    assert item_rows(64, 8, 128) == 8
    assert item_rows(4096, 8, 128) == 64
