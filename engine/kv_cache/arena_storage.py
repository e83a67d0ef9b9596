"""The CPU's K and V over an arena, so that groups of blocks can come and go on simulated cards."""

import numpy as np
import numpy.typing as npt

from engine.kv_cache.geometry import KvGeometry
from engine.kv_cache.storage import STORED, KvStorage, lazy_array


def kv_in_arena(memory: npt.NDArray[np.uint8], geometry: KvGeometry, blocks: int) -> KvStorage:
    """The arrays of `allocate_kv` in the arena of a stage, with room for whole groups; a block is there while its group
    is. `memory` is the arena's range.

    Scales of int8 lie beside it in memory of the host's own, because the kernels want them by layer: the arena's room
    for them, which a card would use, is charged and left empty.
    """
    capacity = geometry.groups(blocks) * geometry.group_blocks
    values = memory[: geometry.scales_start(blocks) * geometry.granule].view(STORED[geometry.dtype])
    beside = (geometry.layers, 2, capacity, geometry.kv_heads)
    scales = lazy_array((*beside, geometry.block_tokens if geometry.scale_bytes else 0), np.dtype(np.uint16))
    return KvStorage(geometry.dtype, values.reshape(*beside, geometry.block_tokens, geometry.head_dim), scales)
