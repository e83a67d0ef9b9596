"""Faults that an engine can be told to have, for tests and demonstrations: what `--faults` says, as data.

Faults are joined by commas, and each is one of FORMS. `@D` is a simulated card. A fault that happens once has happened
for all engines of a service, not for each of them. Nothing here does anything; engine/injection.py does.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import ConfigError

FORMS = (
    "leak=4MiB/request@1",
    "crash=after:40tokens[:every]",
    "hang=after:40tokens[:SECONDS][:every]",
    "poison=user:NAME",
    "oom=request:3",
    "foreign=900MiB@1",
    "nvml=lost:10s[@1]",
)
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class Leak:
    """Each request that starts takes `size` bytes of a card for good, and no ledger knows of them."""

    size: int
    device: int


@dataclass(frozen=True, slots=True)
class Crash:
    """The engine dies when it has told so many tokens; once, unless it is every engine that does."""

    tokens: int
    every: bool


@dataclass(frozen=True, slots=True)
class Hang:
    """The engine thread stops when it has told so many tokens, for some seconds or (None) for ever."""

    tokens: int
    seconds: float | None
    every: bool


@dataclass(frozen=True, slots=True)
class Poison:
    """A request of this user kills the engine at its first step, always. The service marks its Submit."""

    user: str


@dataclass(frozen=True, slots=True)
class MemoryShort:
    """Every step with this request, counted from 1, runs out of memory; once, so not in a later engine."""

    request: int


@dataclass(frozen=True, slots=True)
class Foreign:
    """Another process takes so much of a card when the first request starts: what is free, the rest as it gets free.

    Once; it stays until the service ends.
    """

    size: int
    device: int


@dataclass(frozen=True, slots=True)
class NvmlLoss:
    """The watchdog cannot read a card (None: any) for a while. No business of an engine's."""

    seconds: float
    device: int | None


Fault = Leak | Crash | Hang | Poison | MemoryShort | Foreign | NvmlLoss

_SIZE = r"(\d+(?:\.\d+)?)(B|KiB|MiB|GiB)"
_COUNT = r"([1-9]\d{0,11})"
_SECONDS = r"(\d+(?:\.\d+)?)"
_KINDS: dict[str, tuple[str, Callable[..., Fault]]] = {
    "leak": (f"{_SIZE}/request@(\\d+)", lambda figure, unit, device: Leak(_bytes(figure, unit), int(device))),
    "crash": (f"after:{_COUNT}tokens(:every)?", lambda tokens, every: Crash(int(tokens), bool(every))),
    "hang": (
        f"after:{_COUNT}tokens(?::{_SECONDS}s?)?(:every)?",
        lambda tokens, seconds, every: Hang(int(tokens), float(seconds) if seconds else None, bool(every)),
    ),
    "poison": ("user:(.+)", Poison),
    "oom": (f"request:{_COUNT}", lambda request: MemoryShort(int(request))),
    "foreign": (f"{_SIZE}@(\\d+)", lambda figure, unit, device: Foreign(_bytes(figure, unit), int(device))),
    "nvml": (
        f"lost:{_SECONDS}s(?:@(\\d+))?",
        lambda seconds, device: NvmlLoss(float(seconds), int(device) if device else None),
    ),
}


def parse_faults(spec: str, cards: int) -> tuple[Fault, ...]:
    """What `spec` says, in its order; `cards` is how many simulated cards there are. Raises ConfigError."""
    return tuple(_parse(part.strip(), cards) for part in spec.split(",")) if spec else ()


def _parse(part: str, cards: int) -> Fault:
    kind, _, rest = part.partition("=")
    if kind not in _KINDS:
        raise ConfigError(f"--faults {part}: there is no such fault; there are {', '.join(FORMS)}")
    pattern, made = _KINDS[kind]
    match = re.fullmatch(pattern, rest)
    if match is None:
        form = next(form for form in FORMS if form.startswith(f"{kind}="))
        raise ConfigError(f"--faults {part}: expected {form}")
    fault = made(*match.groups())
    device = getattr(fault, "device", None)
    if device is not None and device >= cards:
        raise ConfigError(f"--faults {part}: " + (f"there are {cards} simulated cards" if cards else _NO_CARDS))
    return fault


_NO_CARDS = "there are no simulated cards; give --simulate-gpus"


def _bytes(figure: str, unit: str) -> int:
    return round(float(figure) * _UNITS[unit])
