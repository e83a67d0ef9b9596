"""The devices whose memory this service watches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from watchdog.snapshot import OwnSource, Reading
from watchdog.source import Card, Source, SourceError


class NoSource:
    """The plain CPU: there is nothing to read."""

    cards: tuple[Card, ...] = ()

    def read(self, device: int, at: float) -> Reading:
        raise SourceError(f"there is no device {device}")

    def holders(self, device: int) -> NoReturn:
        raise SourceError(f"there is no device {device}")

    def close(self) -> None: ...


@dataclass(frozen=True)
class Devices:
    """`own_source` says how the source knows the engine's own bytes.

    `when_watching` is called with the time each time that the first readings under a new engine have come.
    """

    source: Source
    own_source: OwnSource = "none"
    when_watching: Callable[[float], None] = lambda now: None


NO_DEVICES = Devices(NoSource())


@dataclass(frozen=True)
class Simulation:
    """What `--simulate-gpus` and `--faults` make of this service. `poison`: the user whose requests kill the engine."""

    devices: Devices = NO_DEVICES
    poison: str | None = None
