"""The buffers of a stage, side by side in one range of device memory."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import cupy as cp

from engine.memory.virtual import array_at
from engine.plan.scratch import Buffer, nbytes

Array = Any


class Room(Mapping[str, Array]):
    """`buffers` as arrays by name, one after the other from `address` on; `owner` keeps the range mapped.

    All zero at first: what a product reads beyond its columns must be finite, and nobody writes there.
    """

    def __init__(self, buffers: Iterable[Buffer], address: int, owner: object) -> None:
        self._arrays: dict[str, Array] = {}
        for buffer in buffers:
            array = array_at(address, buffer.shape, buffer.dtype, owner)
            array.data.memset(0, array.nbytes)
            self._arrays[buffer.name] = array
            address += buffer.nbytes

    @classmethod
    def allocate(cls, buffers: Iterable[Buffer]) -> Self:
        """In memory of CuPy's on the current device: for tests and benchmarks, which have no plan."""
        wanted = list(buffers)
        memory = cp.empty(nbytes(wanted), cp.uint8)
        return cls(wanted, memory.data.ptr, memory)

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def flat(self, name: str, *shape: int) -> Array:
        """The first elements of a buffer in another shape."""
        size = 1
        for length in shape:
            size *= length
        return self._arrays[name].reshape(-1)[:size].reshape(shape)
