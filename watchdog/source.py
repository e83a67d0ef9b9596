"""Where readings come from. A source knows its cards and reads one at a time; it is used by one thread only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from watchdog.snapshot import Reading

Holders = Mapping[int, int | None]
"""Bytes of a device by process id; None for a process of which only the presence is known."""


class SourceError(Exception):
    """A device, or the whole source, could not be read. The text is one line: why, and the mend if one is known."""


@dataclass(frozen=True, slots=True)
class Card:
    """A distinct physical GPU or MIG instance. Its place in `Source.cards` is its `device` everywhere."""

    uuid: str
    name: str
    bus_id: str | None = None
    parent: str | None = None
    """UUID of the physical GPU that a MIG instance is part of."""


class Source(Protocol):
    """NVML, the CUDA runtime's figures, or the simulation."""

    @property
    def cards(self) -> tuple[Card, ...]: ...

    def read(self, device: int, at: float) -> Reading:
        """Memory of one device, without own and other bytes. Raises SourceError; never returns an old figure."""
        ...

    def holders(self, device: int) -> Holders | None:
        """Who holds how much of the device. None where the source does not tell, or not now."""
        ...

    def close(self) -> None: ...


def sane(reading: Callable[[], Reading]) -> Reading:
    """The reading, if it is one. Raises SourceError for figures that cannot be."""
    try:
        return reading()
    except ValueError as error:
        raise SourceError(f"a reading that is none: {error}") from error
