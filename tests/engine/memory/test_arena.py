"""The host arena gives real pages back, keeps its addresses, and charges what it says it charges."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import OutOfMemory
from engine.memory.arena import GRANULE, HostArena
from engine.memory.ledger import Ledger
from engine.memory.owners import Owner

PAGE = 4096


def resident_bytes(arena):
    """Bytes of the arena's range that are in memory, by the kernel's own account of each page."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = arena.array.nbytes // PAGE
    resident = (ctypes.c_ubyte * pages)()
    address = ctypes.c_void_p(arena.array.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(arena.array.nbytes), resident) == 0, ctypes.get_errno()
    return sum(page & 1 for page in resident) * PAGE


def host_arena(size, granule=GRANULE):
    ledger = Ledger([3])
    return HostArena(ledger, 3, Owner.KV_CACHE, size, granule), ledger


def test_what_is_shrunk_leaves_memory_and_the_rest_stays():
    arena, ledger = host_arena(16 * GRANULE)
    assert arena.grow([(0, 16)]) == ledger.held(3) == 16 * GRANULE
    assert resident_bytes(arena) == 0  # nothing is committed before it is touched
    arena.array[:] = 7
    assert resident_bytes(arena) == 16 * GRANULE
    address = arena.array.ctypes.data
    assert arena.shrink([(5, 3), (9, 1)]) == 4 * GRANULE
    assert resident_bytes(arena) == arena.mapped == ledger.held(3) == 12 * GRANULE
    assert arena.array.ctypes.data == address
    kept = arena.array.reshape(16, GRANULE)
    assert all((kept[i] == 7).all() for i in range(16) if i not in (5, 6, 7, 9))
    arena.grow([(6, 1)])
    assert not kept[6].any()
    arena.array[6 * GRANULE] = 1
    assert ledger.held(3) == 13 * GRANULE


def test_a_range_far_over_the_memory_there_is_costs_nothing():
    arena, ledger = host_arena(200 << 30)
    assert arena.array.nbytes == 200 << 30
    assert arena.mapped == ledger.held(3) == 0
    arena.grow([(100_000, 1)])
    arena.array[100_000 * GRANULE :][:PAGE] = 1
    assert arena.mapped == GRANULE


def test_the_range_is_whole_granules():
    arena, _ = host_arena(GRANULE + 1)
    assert arena.granules == 2


def test_a_granule_is_grown_once_and_shrunk_once():
    arena, ledger = host_arena(4 * GRANULE)
    arena.grow([(1, 2)])
    for first, count in ((0, 2), (2, 1), (3, 2), (-1, 1), (0, 0)):
        with pytest.raises(AssertionError, match="without memory"):
            arena.grow([(first, count)])
    for first, count in ((0, 2), (0, 1), (2, 2), (3, 1)):
        with pytest.raises(AssertionError, match="with memory"):
            arena.shrink([(first, count)])
    assert ledger.held(3) == 2 * GRANULE


def test_a_refused_growth_changes_nothing():
    class FullCard:
        def resize(self, device, owner, size):
            raise OutOfMemory(device, owner, size, 0)

    arena = HostArena(Ledger([0], FullCard()), 0, Owner.SHADOW, 2 * GRANULE)
    with pytest.raises(OutOfMemory):
        arena.grow([(0, 1), (1, 1)])
    assert arena.mapped == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_order_of_growing_and_shrinking(data):
    arena, ledger = host_arena(12 * PAGE, granule=PAGE)
    words = arena.array.view(np.uint64).reshape(12, -1)
    model = [None] * 12  # what each granule holds; None without memory
    for turn in range(1, data.draw(st.integers(1, 30))):
        first = data.draw(st.integers(0, 11))
        count = data.draw(st.integers(1, 12 - first))
        part = model[first : first + count]
        if all(value is None for value in part):
            arena.grow([(first, count)])
            assert not words[first : first + count].any()
            words[first : first + count] = turn
            model[first : first + count] = [turn] * count
        elif all(value is not None for value in part):
            assert arena.shrink([(first, count)]) == count * PAGE
            model[first : first + count] = [None] * count
        present = [i for i, value in enumerate(model) if value is not None]
        assert arena.mapped == ledger.held(3) == resident_bytes(arena) == len(present) * PAGE
        assert all((words[i] == model[i]).all() for i in present)
