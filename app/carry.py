"""What recovery asks of the memory in which KV goes from one engine to the next."""

from typing import Protocol


class Carry(Protocol):
    """See engine.carry_memory.CarryMemory."""

    def budget_bytes(self) -> int: ...

    def clear(self) -> None: ...


class NoCarry:
    """For engines that inherit none."""

    def budget_bytes(self) -> int:
        return 0

    def clear(self) -> None: ...
