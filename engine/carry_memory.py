"""The service's memory in which KV goes from one engine to the next."""

import os
from collections.abc import Callable

from engine.memory.host import available_bytes

MIB = 1 << 20


class CarryMemory:
    """Memory without a name that every engine inherits by its descriptor; empty except over a reload."""

    def __init__(self, limit_mib: int | None = None, available: Callable[[], int] = available_bytes) -> None:
        """Without a limit half of the host's available memory may be used."""
        self._limit_mib = limit_mib
        self._available = available
        self.descriptor = os.memfd_create("ullage-kv")

    def budget_bytes(self) -> int:
        """How much may be carried now; the engine carries no more than it has in use."""
        return self._available() // 2 if self._limit_mib is None else self._limit_mib * MIB

    def clear(self) -> None:
        """Give the memory back."""
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        os.close(self.descriptor)
