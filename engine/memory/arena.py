"""Big buffers that can give real bytes back while every pointer into them stays valid.

An arena reserves a range of addresses once, which costs nothing, and puts memory behind it granule by granule, anywhere
in the range. Kernels, captured graphs and views keep the addresses they were given. A granule must have been grown
before it is read or written; which ones are is the owner's business, and it changes them only between steps.
"""

import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.memory.ledger import Ledger
from engine.memory.owners import Owner

GRANULE = 2 << 20
"""Bytes; the least that a GPU's driver gives or takes back."""

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's number; Python names it from 3.13 on."""


class Arena(Protocol):
    """Granules are numbered from the start of the range. `grow` and `shrink` give bytes, as charged to the ledger."""

    granule: int
    granules: int
    """Length of the range."""

    @property
    def mapped(self) -> int:
        """Bytes that have memory behind them."""

    def grow(self, first: int, count: int) -> int:
        """Put memory behind granules that have none. Raises OutOfMemory; then none of them has any."""

    def shrink(self, first: int, count: int) -> int:
        """Give back the memory behind granules; what was in them is lost."""


class HostArena:
    """The twin in host memory: a private map whose pages are taken when first touched, zero until then.

    It charges whole granules, as a card would; `array` is the range as uint8 [size], which keeps the map alive.
    """

    def __init__(self, ledger: Ledger, device: int, owner: Owner, size: int, granule: int = GRANULE) -> None:
        assert granule % mmap.PAGESIZE == 0
        self.granule = granule
        self.granules = -(-size // granule)
        self._ledger = ledger
        self._device = device
        self._owner = owner
        self._behind = bytearray(self.granules)  # 1 for a granule with memory
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._map = mmap.mmap(-1, self.granules * granule, flags=flags)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @property
    def mapped(self) -> int:
        return self._behind.count(1) * self.granule

    def grow(self, first: int, count: int) -> int:
        assert self._all(first, count, 0), f"of granules {first} to {first + count - 1} some have memory already"
        size = count * self.granule
        self._ledger.charge(self._device, self._owner, size)
        self._behind[first : first + count] = b"\1" * count
        return size

    def shrink(self, first: int, count: int) -> int:
        assert self._all(first, count, 1), f"of granules {first} to {first + count - 1} some have no memory"
        size = count * self.granule
        self._map.madvise(mmap.MADV_DONTNEED, first * self.granule, size)
        self._behind[first : first + count] = bytes(count)
        self._ledger.release(self._device, self._owner, size)
        return size

    def _all(self, first: int, count: int, state: int) -> bool:
        inside = first >= 0 and count > 0 and first + count <= self.granules
        return inside and self._behind.count(state, first, first + count) == count
