"""Big buffers that can give real bytes back while every pointer into them stays valid.

An arena reserves a range of addresses once, which costs nothing, and puts memory behind it granule by granule, anywhere
in the range. Kernels, captured graphs and views keep the addresses they were given. A granule must have been grown
before it is read or written; which ones are is the owner's business, and it changes them only between steps.
"""

import mmap
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.memory.ledger import Ledger
from engine.memory.owners import Owner

GRANULE = 2 << 20
"""Bytes; the least that a GPU's driver gives or takes back."""

Span = tuple[int, int]
"""First granule, and how many."""

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's number; Python names it from 3.13 on."""


class Arena(Protocol):
    """Granules are numbered from the start of the range. `grow` and `shrink` give bytes, as charged to the ledger.

    Spans that are grown are what can be shrunk: a driver takes a piece of memory back only as it was mapped.
    """

    granule: int
    granules: int
    """Length of the range."""

    @property
    def mapped(self) -> int:
        """Bytes that have memory behind them."""

    def grow(self, spans: Sequence[Span]) -> int:
        """Put memory behind granules that have none. Raises OutOfMemory; then none of them has any."""

    def shrink(self, spans: Sequence[Span]) -> int:
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

    def grow(self, spans: Sequence[Span]) -> int:
        size = self._check(spans, 0)
        self._ledger.charge(self._device, self._owner, size)
        for first, count in spans:
            self._behind[first : first + count] = b"\1" * count
        return size

    def shrink(self, spans: Sequence[Span]) -> int:
        size = self._check(spans, 1)
        for first, count in spans:
            self._map.madvise(mmap.MADV_DONTNEED, first * self.granule, count * self.granule)
            self._behind[first : first + count] = bytes(count)
        self._ledger.release(self._device, self._owner, size)
        return size

    def _check(self, spans: Sequence[Span], state: int) -> int:
        """Bytes of the spans, which must all be inside the range and in this state."""
        for first, count in spans:
            inside = first >= 0 and count > 0 and first + count <= self.granules
            same = inside and self._behind.count(state, first, first + count) == count
            assert same, f"granules {first} to {first + count - 1} are not all {('without', 'with')[state]} memory"
        return sum(count for _, count in spans) * self.granule
