"""arena.py's Arena over CUDA virtual memory, and CuPy arrays over its addresses."""

import math
from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np
from cuda.bindings import driver

from engine.errors import OutOfMemory
from engine.memory.arena import Span
from engine.memory.ledger import Ledger
from engine.memory.owners import Owner


class DeviceMemory:
    """Memory of one device. The device's primary context is current where this is used."""

    def __init__(self, device: int) -> None:
        cp.cuda.Device(device).use()
        cp.cuda.runtime.free(0)  # makes the primary context
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granule = int(_ok(driver.cuMemGetAllocationGranularity(self._properties, least)))

    @property
    def free(self) -> int:
        """Bytes, as the runtime says."""
        return int(cp.cuda.runtime.memGetInfo()[0])

    def reserve(self, size: int) -> int:
        return int(_ok(driver.cuMemAddressReserve(size, 0, 0, 0)))

    def back(self, address: int, size: int) -> Any:
        handle = _ok(driver.cuMemCreate(size, self._properties, 0))
        try:
            _ok(driver.cuMemMap(address, size, 0, handle, 0))
            _ok(driver.cuMemSetAccess(address, size, [self._access], 1))
        except (MemoryError, RuntimeError):
            driver.cuMemRelease(handle)
            raise
        return handle

    def release(self, address: int, size: int, handle: Any) -> None:
        _ok(driver.cuMemUnmap(address, size))
        _ok(driver.cuMemRelease(handle))

    def unreserve(self, address: int, size: int) -> None:
        _ok(driver.cuMemAddressFree(address, size))


class DeviceArena:
    """An Arena on a device: every span that is grown is one piece of the driver's, and is given back as one."""

    def __init__(self, ledger: Ledger, device: int, owner: Owner, memory: DeviceMemory, size: int) -> None:
        self.granule = memory.granule
        self.granules = -(-size // memory.granule)
        self._ledger = ledger
        self._device = device
        self._owner = owner
        self._memory = memory
        self._pieces: dict[Span, Any] = {}
        self.address = memory.reserve(self.granules * self.granule)

    @property
    def mapped(self) -> int:
        return sum(count for _, count in self._pieces) * self.granule

    def grow(self, spans: Sequence[Span]) -> int:
        """Raises OutOfMemory; then none of the spans has memory."""
        size = sum(count for _, count in spans) * self.granule
        self._ledger.charge(self._device, self._owner, size)
        taken: list[Span] = []
        try:
            for first, count in spans:
                at = self.address + first * self.granule
                self._pieces[first, count] = self._memory.back(at, count * self.granule)
                taken.append((first, count))
        except MemoryError as error:
            self._give_back(taken)
            self._ledger.release(self._device, self._owner, size)
            raise OutOfMemory(self._device, self._owner, size, self._memory.free) from error
        return size

    def shrink(self, spans: Sequence[Span]) -> int:
        """Nothing queued on the device may touch them. Spans are those that were grown."""
        size = sum(count for _, count in spans) * self.granule
        self._give_back(spans)
        self._ledger.release(self._device, self._owner, size)
        return size

    def close(self) -> None:
        """Give back everything, the addresses too."""
        self.shrink(list(self._pieces))
        self._memory.unreserve(self.address, self.granules * self.granule)

    def _give_back(self, spans: Sequence[Span]) -> None:
        for first, count in spans:
            piece = self._pieces.pop((first, count))
            self._memory.release(self.address + first * self.granule, count * self.granule, piece)


def array_at(
    address: int, shape: tuple[int, ...], dtype: Any, owner: object, strides: tuple[int, ...] | None = None
) -> Any:
    """A cupy.ndarray over addresses that `owner` keeps reserved; what is not backed must not be touched."""
    itemsize = np.dtype(dtype).itemsize
    size = (
        math.prod(shape) * itemsize
        if strides is None
        else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    )
    memory = cp.cuda.UnownedMemory(address, size + itemsize, owner)
    return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0), strides=strides)


def _ok(answer: tuple[Any, ...]) -> Any:
    code = answer[0]
    if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise MemoryError("the device has no memory left")
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {driver.cuGetErrorString(code)[1].decode()} ({code.name})")
    return answer[1] if len(answer) > 1 else None
