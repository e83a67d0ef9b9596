"""What the engine itself knows to hold on each device, by owner, to the byte.

The ledger is told; it never measures. What a driver holds on our behalf (context, modules, graphs) is charged once, at
load, as a difference of free memory. Policy believes the device's own figure, never this one.
"""

from collections.abc import Iterable
from typing import Protocol

from engine.memory.owners import CHARGED, Owner


class Card(Protocol):
    """A device that must be asked: simulated ones have no driver that would refuse for them."""

    def resize(self, device: int, owner: str, size: int) -> None:
        """This process holds `size` bytes as `owner` from now on. Raises OutOfMemory, and changes nothing then."""


class Ledger:
    """Bytes by device and owner. `card` is asked before anything is charged.

    Only the engine thread charges; `snapshot` may be taken from any thread.
    """

    def __init__(self, devices: Iterable[int], card: Card | None = None) -> None:
        self._bytes: dict[int, dict[Owner, int]] = {device: dict.fromkeys(CHARGED, 0) for device in devices}
        self._card = card
        self.changes = 0
        """How often anything has changed."""

    def charge(self, device: int, owner: Owner, size: int) -> None:
        """Raises OutOfMemory where the card has less free; then nothing is charged."""
        assert size >= 0
        self._set(device, owner, self._bytes[device][owner] + size)

    def release(self, device: int, owner: Owner, size: int) -> None:
        held = self._bytes[device][owner]
        assert 0 <= size <= held, f"device {device}: {owner} holds {held} bytes, {size} were released"
        self._set(device, owner, held - size)

    def _set(self, device: int, owner: Owner, size: int) -> None:
        if self._card is not None:
            self._card.resize(device, owner, size)
        self._bytes[device][owner] = size
        self.changes += 1

    def held(self, device: int, owner: Owner | None = None) -> int:
        """Bytes of one owner, or of all."""
        rows = self._bytes[device]
        return sum(rows.values()) if owner is None else rows[owner]

    def snapshot(self) -> dict[int, dict[str, int]]:
        """{device: {owner: bytes}} as plain data, every charged owner present."""
        return {device: {owner.value: size for owner, size in rows.items()} for device, rows in self._bytes.items()}
