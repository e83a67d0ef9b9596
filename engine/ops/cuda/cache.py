"""Keys and values on the device, paged as engine/kv_cache/storage.py has it.

Layout: [layer][K | V][block][kv head][token][dim].
"""

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
    kv heads, 64]. Planes (the first two axes) may lie apart, as in an arena; each is contiguous.
    `tables` int32 [sequences, width]: the block of each 64 positions of a sequence."""

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
        inner = *self.data.shape[2:4], BLOCK_TOKENS
        k, v = (
            address(self.data[layer, half], "int8" if self.int8 else "float16", (*inner, self.dim), "cache")
            for half in (0, 1)
        )
        tables = address(self.tables, "int32", (None, None), "tables")
        struct = CacheStruct(k, v, tables=tables, table_width=self.tables.shape[1], kv_heads=self.kv_heads)
        if self.scales is not None:
            struct.k_scales = address(self.scales[layer, 0], "float16", inner, "scales")
            struct.v_scales = address(self.scales[layer, 1], "float16", inner, "scales")
        return struct
