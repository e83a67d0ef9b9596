"""The arrays that hold K and V: [layer][K | V][block][kv head][token][dim], committed page by page as they are touched.

Which block belongs to whom is accounted elsewhere (blocks.py); here is only memory.
"""

import math
import mmap
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine.config import BLOCK_TOKENS

KvDtype = Literal["f32", "f16", "int8"]
STORED: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
}
"""Element type of each `--kv-dtype`; a half float is held by its bits, for the CPU computes with none."""

SLACK = 16
"""Elements after the last one that a kernel may read, for it reads sixteen at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class KvStorage:
    """`data` [layers, 2, blocks, kv heads, 64, dim] as STORED says; int8 values are multiplied by `scales`, the bits
    of half floats [layers, 2, blocks, kv heads, 64], which is empty for the other types.
    """

    dtype: KvDtype
    data: npt.NDArray[Any]
    scales: npt.NDArray[np.uint16]

    @property
    def blocks(self) -> int:
        return int(self.data.shape[2])


def allocate_kv(dtype: KvDtype, layers: int, blocks: int, kv_heads: int, head_dim: int) -> KvStorage:
    """Room for `blocks` blocks of 64 tokens, all zero; memory is taken when a block is first written.

    Raises MemoryError when the system refuses even the addresses.
    """
    shape = (layers, 2, blocks, kv_heads, BLOCK_TOKENS, head_dim)
    scales = (layers, 2, blocks, kv_heads, BLOCK_TOKENS if dtype == "int8" else 0)
    return KvStorage(dtype, _lazy(shape, STORED[dtype]), _lazy(scales, np.dtype(np.uint16)))


def kv_token_bytes(dtype: str, layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes that one token takes in `allocate_kv`'s arrays."""
    scale = np.dtype(np.uint16).itemsize if dtype == "int8" else 0
    return layers * 2 * kv_heads * (head_dim * STORED[dtype].itemsize + scale)


def _lazy(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    # A private map of small pages: numpy's own large arrays ask for 2 MiB pages, and one block touches as many of them
    # as there are layers.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    elements = math.prod(shape)
    size = (elements + SLACK) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        raise MemoryError(f"{size} bytes for keys and values: {error.strerror}") from error
    return np.frombuffer(memory, dtype, elements).reshape(shape)
