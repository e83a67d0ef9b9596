"""The accounting of arenas: what is backed and released, to the byte, also when memory runs out half way."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.arena import Arena, Cut

GRANULE = 2 << 20


class Counted:
    """Memory that knows every piece; refuses beyond `room` bytes."""

    granule = GRANULE

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.reserved: dict[int, int] = {}
        self.pieces: dict[int, int] = {}

    @property
    def used(self) -> int:
        return sum(self.pieces.values())

    def reserve(self, size: int) -> int:
        address = 1 << 44
        self.reserved[address] = size
        return address

    def back(self, address: int, size: int) -> int:
        assert not size % GRANULE
        assert not address % GRANULE
        assert all(address + size <= at or at + held <= address for at, held in self.pieces.items())
        if self.used + size > self.room:
            raise MemoryError
        self.pieces[address] = size
        return address

    def release(self, address: int, size: int, handle: int) -> None:
        assert handle == address
        assert self.pieces.pop(address) == size

    def unreserve(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not self.pieces


def test_shrinking_returns_the_bytes_and_growing_takes_them_again() -> None:
    memory = Counted()
    arena = Arena(memory, planes=6, cut=Cut.of(800 << 20, 100 << 20, GRANULE))
    assert arena.real_bytes == memory.used == 6 * 100 << 20
    assert arena.resize(800 << 20) == memory.used - (600 << 20)
    full = memory.used
    freed = arena.resize(400 << 20)
    assert freed < 0
    assert memory.used == full + freed
    assert 400 << 20 <= arena.backed < (400 << 20) + arena.cut.piece
    assert arena.resize(0) < 0
    assert arena.backed == 100 << 20
    arena.close()
    assert not memory.reserved


def test_out_of_memory_leaves_whole_pieces() -> None:
    """Room for the floor and two and a half pieces of every plane: two are kept, nothing of the third."""
    cut = Cut.of(640 << 20, 64 << 20, GRANULE, pieces=9)
    assert cut.piece == 64 << 20
    memory = Counted(room=4 * (64 << 20) * 7 // 2)
    arena = Arena(memory, planes=4, cut=cut)
    with pytest.raises(MemoryError):
        arena.resize(640 << 20)
    assert arena.real_bytes == memory.used == 4 * 3 * (64 << 20)
    memory.room *= 10
    arena.resize(640 << 20)
    assert arena.backed == 640 << 20


def test_no_room_for_the_floor_takes_nothing() -> None:
    memory = Counted(room=10 << 20)
    with pytest.raises(MemoryError):
        Arena(memory, planes=3, cut=Cut.of(64 << 20, 4 << 20, GRANULE))
    assert not memory.used
    assert not memory.reserved


@given(
    st.integers(1, 9),
    st.integers(1, 1 << 31),
    st.floats(0.001, 1),
    st.integers(1, 80),
    st.lists(st.floats(0, 1), max_size=12),
)
def test_any_sizes(planes: int, most: int, floor: float, pieces: int, sizes: Sequence[float]) -> None:
    memory = Counted()
    cut = Cut.of(most, max(1, int(most * floor)), GRANULE, pieces)
    assert most <= cut.most < most + cut.piece + 2 * GRANULE
    arena = Arena(memory, planes, cut)
    for share in sizes:
        before = memory.used
        assert arena.resize(int(share * most)) == memory.used - before
        assert arena.backed >= share * most - 1
        assert arena.real_bytes == memory.used
    arena.close()
    assert not memory.used
