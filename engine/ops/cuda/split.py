"""How k is cut into segments, and which kernel takes a product. Pure: the order of every sum is decided here.

A row's bits depend on `segment_of` alone, never on the number of rows: linear.cu sums each segment in order of k and
adds the segments in order, in every kernel.
"""

from dataclasses import dataclass

from engine.ops.cuda.layout import Format

MAX_SPLIT = 8
"""Segments of k at most; also the warps of a linear_rows block."""
SMALL_SPLIT = 4
"""The same where a block has less than ROOMY_SHARED bytes of shared memory (compute capability 8.6, 8.9, 12.0)."""
ROOMY_SHARED = 160 << 10
TILE_TOKENS = 64
"""Rows of x that linear_tile and the widest linear_rows take."""
TILE_BLOCK_TILES = 8
"""Row tiles of a linear_tile block."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device has of two things that decide how work is cut."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory of one block, at most."""
    multiprocessor_shared_bytes: int

    @property
    def max_split(self) -> int:
        return MAX_SPLIT if self.shared_bytes >= ROOMY_SHARED else SMALL_SPLIT


def segment_of(records: int, limits: Limits) -> int:
    """Records in one segment of k (the last may have fewer): as few as the most segments allow."""
    return -(-records // limits.max_split)


def stage_records(form: Format) -> int:
    """Records of one row tile in one stage of a ring (STAGE_RECORDS of linear.cuh)."""
    return 1 if form.record_bytes > 1280 else 2 if form.record_bytes > 640 else 4


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """One launch of linear.cu. The grid of a linear_rows kernel is the work there is: fewer blocks may go through
    it."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared: int


def rows_kernel(tokens: int, row_tiles: int) -> str:
    return f"linear_rows_{tokens}_{row_tiles}"


TILE_KERNEL = "linear_tile_8_2"


def item_rows(m: int, experts_used: int, experts: int) -> int:
    """Rows of one work item of a grouped product of `m` tokens: 8, or 64 where experts have many rows each."""
    return 8 if m * experts_used < 32 * experts else TILE_TOKENS


def launch_shape(
    form: Format,
    tiles: int,
    segments: int,
    m: int,
    limits: Limits,
    *,
    gated: bool,
    items: int = 0,
    rows_of_item: int = 0,
) -> LaunchShape:
    """The kernel for `m` rows (or for `items` work items of up to `rows_of_item` rows) over `tiles` row tiles."""
    if items:
        tokens, columns = 1 if rows_of_item == 8 else 8, items
    else:
        tokens = next((n for n in (1, 2, 4) if m <= 8 * n), 8)
        columns = -(-m // (8 * tokens))
    if tokens == 8 and tile_shared(form) <= limits.shared_bytes:
        blocks = -(-tiles // TILE_BLOCK_TILES)
        if items or 2 * blocks * columns >= limits.multiprocessors:
            return LaunchShape(TILE_KERNEL, (blocks, columns, 1), 128, tile_shared(form))
    # One row tile a block where two would leave multiprocessors without work, or where there is enough of it.
    single = (
        tokens == 1
        and not gated
        and not limits.multiprocessors <= -(-tiles // 2) * columns < 4 * limits.multiprocessors
    )
    block_tiles = 1 if single else 2
    grid = -(-tiles // block_tiles), columns, 1
    return LaunchShape(rows_kernel(tokens, block_tiles), grid, segments * 32, rows_shared(form, block_tiles, segments))


def fewer_blocks(grid: tuple[int, int, int], resident: int) -> tuple[int, int, int]:
    """A grid for the same work where each block goes through several row tiles, if there are more than are
    `resident`."""
    groups, items, _ = grid
    return min(groups, max(1, -(-resident // items))), items, 1


def balancing_shared(blocks: int, resident_each: int, limits: Limits) -> int:
    """Shared memory to ask for, so that no multiprocessor holds more blocks of a small launch than its even share.

    Kernels start while the one before them still runs (programmatic dependent launch): free places are then uneven, and
    without this one multiprocessor takes three blocks while its neighbour takes one.
    """
    share = -(-blocks // limits.multiprocessors)
    return limits.multiprocessor_shared_bytes // (share + 1) if share < resident_each else 0


def _warp_bytes(form: Format, row_tiles: int) -> int:
    """Two stages of records, and one stage's expanded scales."""
    records = stage_records(form)
    return row_tiles * records * (2 * form.record_bytes + form.tiles * form.scale_tile_bytes)


def rows_shared(form: Format, block_tiles: int, segments: int) -> int:
    return segments * (_warp_bytes(form, block_tiles) + 2 * block_tiles * 640)


def tile_shared(form: Format) -> int:
    return 2 * TILE_TOKENS * 128 + 4 * (_warp_bytes(form, 2) + 2 * 8 * 512)


def greatest_shared(form: Format, limits: Limits) -> dict[str, int]:
    """Dynamic shared memory that each kernel may ask for."""
    tokens_and_tiles = ((1, 1), (1, 2), (2, 2), (4, 2), (8, 2))
    sizes = {rows_kernel(*pair): rows_shared(form, pair[1], limits.max_split) for pair in tokens_and_tiles}
    return sizes | ({TILE_KERNEL: tile_shared(form)} if tile_shared(form) <= limits.shared_bytes else {})
