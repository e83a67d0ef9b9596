"""Arenas over real virtual memory: bytes come back, and a captured graph goes on working on what stays."""

from typing import Any

import cupy as cp
import numpy as np

from engine.memory.arena import Arena, Cut
from engine.memory.virtual import DeviceMemory, array_at

MIB = 1 << 20


def free() -> int:
    return int(cp.cuda.runtime.memGetInfo()[0])


def test_shrink_returns_bytes_under_a_live_graph(stream: Any) -> None:
    memory = DeviceMemory(0)
    warm = cp.empty(1, cp.uint32)  # the driver's own room for its first fill, and for its first graph
    cp.cuda.runtime.memsetAsync(warm.data.ptr, 0, 4, stream.ptr)
    stream.begin_capture()
    cp.cuda.runtime.memsetAsync(warm.data.ptr, 0, 4, stream.ptr)
    stream.end_capture().launch(stream)
    stream.synchronize()
    cut = Cut.of(256 * MIB, 32 * MIB, memory.granule, pieces=14)
    before = free()
    arena = Arena(memory, 3, cut)
    assert before - free() == arena.real_bytes == 96 * MIB
    arena.resize(256 * MIB)
    assert before - free() == arena.real_bytes == 768 * MIB
    planes = array_at(arena.address, (3, 8 * MIB), np.float32, arena, strides=(arena.stride, 4))
    for plane in planes:
        cp.cuda.runtime.memsetAsync(plane.data.ptr, 0, 32 * MIB, stream.ptr)
    stream.begin_capture()
    cp.cuda.runtime.memsetAsync(planes[2].data.ptr, 0x11, 32 * MIB, stream.ptr)
    graph = stream.end_capture()
    for _ in range(100):
        graph.launch(stream)
    arena.resize(100 * MIB)  # nothing queued touches what is given up
    assert before - free() == arena.real_bytes == 3 * 112 * MIB
    graph.launch(stream)
    stream.synchronize()
    assert (cp.asnumpy(planes[2]).view(np.uint32) == 0x11111111).all()
    assert not cp.asnumpy(planes[1]).any()
    arena.resize(256 * MIB)
    graph.launch(stream)
    stream.synchronize()
    del graph
    arena.close()
    assert free() == before
