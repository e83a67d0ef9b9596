"""Keys and values on the device, paged as engine/kv_cache/storage.py has it: [layer][K | V][block][kv head][token][dim]."""

import ctypes
from dataclasses import dataclass

from engine.config import BLOCK_TOKENS
from engine.ops.cuda.launch import Array, Pointer, address


class CacheStruct(ctypes.Structure):
    """`Cache` of common.cuh."""

    _fields_ = (
        ("k", Pointer),
        ("v", Pointer),
        ("k_scales", Pointer),
        ("v_scales", Pointer),
        ("tables", Pointer),
        ("table_width", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """`data` float16 or int8 [layers, 2, blocks, kv heads, 64, dim]; int8 has `scales` float16 [layers, 2, blocks,
    kv heads, 64]. `tables` int32 [sequences, width]: the block of each 64 positions of a sequence."""

    data: Array
    scales: Array | None
    tables: Array

    @property
    def int8(self) -> bool:
        return self.scales is not None

    @property
    def kv_heads(self) -> int:
        return int(self.data.shape[3])

    @property
    def dim(self) -> int:
        return int(self.data.shape[5])

    def struct(self, layer: int) -> CacheStruct:
        """Raises ValueError."""
        shape = self.data.shape[1:4]
        at = address(self.data, "int8" if self.int8 else "float16", (None, *shape, BLOCK_TOKENS, self.dim), "cache")
        tables = address(self.tables, "int32", (None, None), "tables")
        half = self.data.strides[1]
        k = Pointer((at.value or 0) + 2 * layer * half)
        v = Pointer((k.value or 0) + half)
        struct = CacheStruct(k, v, tables=tables, table_width=self.tables.shape[1], kv_heads=self.kv_heads)
        if self.scales is not None:
            scales = address(self.scales, "float16", (None, *shape, BLOCK_TOKENS), "scales")
            struct.k_scales = Pointer((scales.value or 0) + 2 * layer * self.scales.strides[1])
            struct.v_scales = Pointer((struct.k_scales or 0) + self.scales.strides[1])
        return struct
