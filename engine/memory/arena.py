"""Buffers whose real memory grows and shrinks while their addresses stay: pointers inside captured graphs remain valid.

An arena reserves addresses once and backs them piece by piece. It has one or more planes of equal size (K and V of each
layer), all backed from their start to the same length, because the cache's block index runs within a plane. What the
accounting decides is here, without a GPU; `Memory` is the device (virtual.py) or a test's.
"""

from dataclasses import dataclass
from typing import Any, Protocol


class Memory(Protocol):
    """Virtual memory of one device. Sizes and addresses are multiples of `granule`."""

    granule: int

    def reserve(self, size: int) -> int:
        """Addresses without memory."""

    def back(self, address: int, size: int) -> Any:
        """Put memory behind addresses; a handle for `release`. Raises MemoryError when the device has none left."""

    def release(self, address: int, size: int, handle: Any) -> None:
        """Give the memory back to the device; the addresses stay reserved."""

    def unreserve(self, address: int, size: int) -> None:
        """Give the addresses back."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one plane is cut into pieces: one of `floor` bytes that always stays, then pieces of `piece` bytes.

    All are multiples of the granule, and floor + a whole number of pieces is the plane's size.
    """

    floor: int
    piece: int
    pieces: int

    @classmethod
    def of(cls, most: int, floor: int, granule: int, pieces: int = 64) -> "Cut":
        """For planes of up to `most` bytes of which the first `floor` are never released, in about `pieces` pieces."""
        assert 0 < floor <= most
        floor = _up(floor, granule)
        rest = _up(max(most - floor, 0), granule)
        piece = _up(max(rest // pieces, 1), granule)
        return cls(floor, piece, -(-rest // piece))

    @property
    def most(self) -> int:
        return self.floor + self.pieces * self.piece

    def needed(self, size: int) -> int:
        """Pieces beyond the floor that hold `size` bytes."""
        assert size <= self.most, f"{size} bytes in a plane of {self.most}"
        return max(0, -(-(size - self.floor) // self.piece))

    def backed(self, pieces: int) -> int:
        return self.floor + pieces * self.piece


class Arena:
    """`planes` planes at `address`, `stride` bytes apart, each backed to `backed` bytes."""

    def __init__(self, memory: Memory, planes: int, cut: Cut) -> None:
        """Reserves all addresses and backs the floor. Raises MemoryError, having taken nothing."""
        self._memory = memory
        self.planes = planes
        self.cut = cut
        self.address = memory.reserve(planes * cut.most)
        self._floor: list[Any] = []
        self._pieces: list[list[Any]] = []
        try:
            self._floor = self._back_all(0, cut.floor)
        except MemoryError:
            memory.unreserve(self.address, planes * cut.most)
            raise

    @property
    def stride(self) -> int:
        return self.cut.most

    @property
    def backed(self) -> int:
        """Usable bytes of each plane."""
        return self.cut.backed(len(self._pieces))

    @property
    def real_bytes(self) -> int:
        """What the arena takes of the device."""
        return self.planes * self.backed

    def resize(self, size: int) -> int:
        """Back each plane for `size` bytes, at least the floor; returns the change of `real_bytes`.

        Only while nothing reads or writes what is given up. Raises MemoryError: what could be backed stays backed.
        """
        before, wanted = self.real_bytes, self.cut.needed(size)
        while len(self._pieces) > wanted:
            at = self.cut.backed(len(self._pieces) - 1)
            self._release_all(at, self.cut.piece, self._pieces.pop())
        while len(self._pieces) < wanted:
            self._pieces.append(self._back_all(self.backed, self.cut.piece))
        return self.real_bytes - before

    def close(self) -> None:
        """Give everything back."""
        self.resize(self.cut.floor)
        self._release_all(0, self.cut.floor, self._floor)
        self._floor = []
        self._memory.unreserve(self.address, self.planes * self.cut.most)

    def _back_all(self, at: int, size: int) -> list[Any]:
        """One piece of every plane, or none of any."""
        handles: list[Any] = []
        try:
            for plane in range(self.planes):
                handles.append(self._memory.back(self.address + plane * self.stride + at, size))
        except MemoryError:
            self._release_all(at, size, handles)
            raise
        return handles

    def _release_all(self, at: int, size: int, handles: list[Any]) -> None:
        for plane, handle in enumerate(handles):
            self._memory.release(self.address + plane * self.stride + at, size, handle)


def _up(size: int, granule: int) -> int:
    return -(-size // granule) * granule
