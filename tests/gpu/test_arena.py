"""Arenas over real virtual memory: bytes come back, and a captured graph goes on working on what stays."""

from typing import Any

import cupy as cp
import numpy as np
import pytest

from engine.errors import OutOfMemory
from engine.memory.ledger import Ledger
from engine.memory.owners import Owner
from engine.memory.virtual import DeviceArena, DeviceMemory, array_at

MIB = 1 << 20


def free() -> int:
    return int(cp.cuda.runtime.memGetInfo()[0])


@pytest.fixture
def memory(stream: Any) -> DeviceMemory:
    warm = cp.empty(1, cp.uint32)  # the driver's own room for its first fill, and for its first graph
    cp.cuda.runtime.memsetAsync(warm.data.ptr, 0, 4, stream.ptr)
    stream.begin_capture()
    cp.cuda.runtime.memsetAsync(warm.data.ptr, 0, 4, stream.ptr)
    stream.end_capture().launch(stream)
    stream.synchronize()
    return DeviceMemory(0)


def test_shrink_returns_bytes_under_a_live_graph(memory: DeviceMemory, stream: Any) -> None:
    ledger, before = Ledger([0]), free()
    arena = DeviceArena(ledger, 0, Owner.KV_CACHE, memory, 512 * MIB)
    per_piece = 32 * MIB // memory.granule
    pieces = [(n * per_piece, per_piece) for n in range(16)]
    assert before == free()
    assert arena.grow(pieces) == before - free() == arena.mapped == 512 * MIB
    plane = array_at(arena.address, (8 * MIB,), np.uint32, arena)
    stream.begin_capture()
    cp.cuda.runtime.memsetAsync(plane.data.ptr, 0x11, 32 * MIB, stream.ptr)
    graph = stream.end_capture()
    for _ in range(100):
        graph.launch(stream)
    assert arena.shrink(pieces[3:7] + pieces[9:]) == 11 * 32 * MIB  # nothing queued touches what is given up
    assert before - free() == arena.mapped == 5 * 32 * MIB
    graph.launch(stream)
    stream.synchronize()
    assert (cp.asnumpy(plane) == 0x11111111).all()
    arena.grow(pieces[3:7])
    assert ledger.held(0, Owner.KV_CACHE) == arena.mapped == before - free()
    graph.launch(stream)
    stream.synchronize()
    del graph, plane
    arena.close()
    assert free() == before
    assert ledger.held(0, Owner.KV_CACHE) == 0


def test_what_does_not_fit_takes_nothing(memory: DeviceMemory) -> None:
    before = free()
    half = -(-(before // 2 + 64 * MIB) // memory.granule)
    arena = DeviceArena(Ledger([0]), 0, Owner.KV_CACHE, memory, 2 * half * memory.granule)
    with pytest.raises(OutOfMemory, match="device 0"):
        arena.grow([(0, half), (half, half)])
    assert (free(), arena.mapped) == (before, 0)
    arena.close()
