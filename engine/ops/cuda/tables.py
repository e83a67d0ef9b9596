"""Block tables on the devices, kept up to date from a mirror on the host."""

from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from engine.ops.cuda.launch import Array


def pinned(shape: tuple[int, ...]) -> Array:
    """int32 zeros in host memory that a device copies from and to without waiting."""
    size = int(np.prod(shape))
    memory = cp.cuda.alloc_pinned_memory(4 * size)
    array = np.frombuffer(memory, np.int32, size).reshape(shape)
    array[...] = 0
    return array


class BlockTables:
    """`tables` int32 [slots, width] of every stage, each with its stream.

    A slot's list of blocks only grows until it is forgotten, and it is forgotten only when no launched step names it:
    so the mirror may be written while copies from it are queued.
    """

    def __init__(self, stages: Sequence[tuple[Array, Any]]) -> None:
        self._stages = stages
        self._mirror = pinned(stages[0][0].shape)
        self._known = [0] * len(self._mirror)

    def forget(self, slot: int) -> None:
        self._known[slot] = 0

    def update(self, slot: int, blocks: Sequence[int]) -> None:
        """Queue what is new; nothing where nothing is."""
        known, count = self._known[slot], len(blocks)
        if count <= known:
            return
        self._mirror[slot, known:count] = blocks[known:]
        self._known[slot] = count
        source = self._mirror[slot, known:].ctypes.data
        for tables, stream in self._stages:
            target = tables.data.ptr + 4 * (slot * tables.shape[1] + known)
            kind = cp.cuda.runtime.memcpyHostToDevice
            cp.cuda.runtime.memcpyAsync(target, source, 4 * (count - known), kind, stream.ptr)
