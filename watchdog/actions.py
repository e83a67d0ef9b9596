"""What the policy may ask for, and what comes back. app/pressure.py carries it out; nothing here does."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from watchdog.snapshot import GRANULE


class Rung(StrEnum):
    """The ladder, in order of cost."""

    POOLS = "pools"
    STACK_LIMIT = "stack_limit"
    CUBLAS_WORKSPACE = "cublas_workspace"
    GRAPH_CACHE = "graph_cache"
    ELASTIC = "elastic"
    RELOAD = "reload"


TRIMS = (Rung.POOLS, Rung.STACK_LIMIT, Rung.CUBLAS_WORKSPACE, Rung.GRAPH_CACHE, Rung.ELASTIC)
IDLE_RUNGS = (Rung.POOLS, Rung.STACK_LIMIT, Rung.CUBLAS_WORKSPACE)
"""What costs nobody anything while nothing runs: no graph and no cached prefix goes."""


class ReloadReason(StrEnum):
    FLOOR = "vram_floor"
    GROWTH = "vram_growth"
    FORECAST = "vram_forecast"


@dataclass(frozen=True, slots=True)
class Trim:
    """Take one rung. `wanted` is the room to make in bytes for `elastic`, None for the others: all they have."""

    device: int
    rung: Rung
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class Regrow:
    """Give elastic memory up to `wanted` bytes back."""

    device: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Cap:
    """Stop `owner` from growing beyond what it holds."""

    device: int
    owner: str


@dataclass(frozen=True, slots=True)
class Reload:
    """Replace the engine, for the sake of `device`."""

    device: int
    reason: ReloadReason


Action = Trim | Regrow | Cap | Reload

Result = Literal["ok", "noop", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an action other than a reload went; `returned` is what the source measured after a sync, in bytes.

    `at` is when it was over: only a sample taken later may lead to the next one.
    """

    action: Trim | Regrow | Cap
    at: float
    result: Result
    returned: int = 0
    seconds: float = 0.0


def whole(wanted: float) -> int:
    """Bytes rounded up to whole pieces of device memory."""
    return max(0, -(-int(wanted) // GRANULE) * GRANULE)
