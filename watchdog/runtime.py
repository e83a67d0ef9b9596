"""The CUDA runtime's own idea of a device: the last resort, where NVML never worked or has no figure for a card.

The service itself never opens a CUDA context, so the engine tells these figures and they can be old.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from watchdog.snapshot import Reading
from watchdog.source import Card, SourceError, sane

OLDEST_S = 5.0


@dataclass(frozen=True, slots=True)
class RuntimeFigure:
    """Bytes of a device as the engine told them at `at`."""

    at: float
    total: int
    free: int


Figures = Callable[[str], RuntimeFigure | None]
"""The latest figure of a device by UUID."""


class RuntimeSource:
    """A Source for a machine on which NVML never worked: the cards are those that the engine named."""

    def __init__(self, cards: Sequence[Card], figures: Figures) -> None:
        self.cards = tuple(cards)
        self._figures = figures

    def read(self, device: int, at: float) -> Reading:
        return runtime_reading(self._figures(self.cards[device].uuid), at)

    def holders(self, device: int) -> None:
        return None

    def close(self) -> None:
        """Holds nothing."""


def runtime_reading(figure: RuntimeFigure | None, at: float) -> Reading:
    """Raises SourceError for a figure that is missing or older than 5 s."""
    if figure is None or at - figure.at > OLDEST_S:
        raise SourceError("runtime: the engine has told no memory figure of late")
    return sane(lambda: Reading(figure.at, figure.total, figure.free, source="runtime"))
