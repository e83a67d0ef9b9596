"""The CPU's arrays over an arena lie where the geometry says."""

import numpy as np
import pytest

from engine.kv_cache.arena_storage import kv_in_arena
from engine.kv_cache.geometry import KvGeometry
from engine.kv_cache.storage import STORED, allocate_kv
from engine.memory.arena import HostArena
from engine.memory.ledger import Ledger
from engine.memory.owners import Owner

PAGE = 1 << 12


def in_arena(dtype, blocks=10):
    geometry = KvGeometry(3, 2, 24, dtype, granule=PAGE)
    arena = HostArena(Ledger([0]), 0, Owner.KV_CACHE, geometry.address_granules(blocks) * PAGE, PAGE)
    return geometry, arena, kv_in_arena(arena.array, geometry, blocks)


@pytest.mark.parametrize("dtype", STORED)
def test_each_block_is_in_the_granules_of_its_group(dtype):
    geometry, arena, kv = in_arena(dtype)
    assert kv.blocks >= 10
    start = arena.array.ctypes.data
    for block in range(10):
        spans = geometry.value_spans(block // geometry.group_blocks, 10)
        for run, (first, count) in enumerate(spans):
            values = kv.data[run // 2, run % 2, block]
            assert values.flags.c_contiguous
            assert values.nbytes == geometry.run_bytes
            offset = values.ctypes.data - start
            assert first * PAGE <= offset
            assert offset + values.nbytes <= (first + count) * PAGE


@pytest.mark.parametrize("dtype", STORED)
def test_shapes_are_those_of_the_plain_storage(dtype):
    _, _, kv = in_arena(dtype)
    plain = allocate_kv(dtype, 3, kv.blocks, 2, 24)
    assert (kv.data.shape, kv.data.dtype, kv.scales.shape) == (plain.data.shape, plain.data.dtype, plain.scales.shape)
    assert not np.any(kv.scales)
