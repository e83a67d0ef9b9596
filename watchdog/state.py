"""The policy's memory and its words: what it sees, what it keeps between samples, what it says."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from watchdog.actions import Action, ReloadReason
from watchdog.floors import Floors, Level
from watchdog.ladder import Ladder
from watchdog.snapshot import MIB, Holdings
from watchdog.trend import Forecast, TrendClass

EnginePhase = Literal["serving", "loading", "reloading", "stuck"]


FOOT = Ladder()


class State(StrEnum):
    OK = "ok"
    WATCH = "watch"
    TRIM = "trim"
    DRAIN = "drain"
    RELOAD = "reload"
    BLIND = "blind"
    DEGRADED = "degraded"
    STUCK = "stuck"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class View:
    """One device at one sample. Bytes; None is unknown. `foreign`: what others hold more than at ready."""

    at: float
    device: int
    floors: Floors
    holdings: Holdings
    free: int | None
    idle_free: int | None
    kind: TrendClass = TrendClass.FLAT
    bytes_per_second: float | None = None
    forecast: Forecast | None = None
    fill_owner: str | None = None
    foreign: int | None = None
    idle_for: float | None = None
    """Seconds since the last request ended; None while something runs or waits."""
    engine: EnginePhase = "serving"


@dataclass(frozen=True, slots=True)
class Due:
    """A reload that is set and waits for an idle moment. Without a deadline elastic memory bridges the wait."""

    reason: ReloadReason
    since: float
    deadline: float | None


@dataclass(frozen=True, slots=True)
class Degraded:
    """A reload is due but barred. `free` is the idle free memory then: a rise above it re-arms."""

    since: float
    free: int
    why: str


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What the policy keeps of one device. `level` is the confirmed one; `seen` samples in a row said `worse`."""

    level: Level = Level.OK
    worse: Level = Level.OK
    seen: int = 0
    soon: int = 0
    """Samples in a row whose forecast was inside the horizon."""
    low: int = 0
    """Samples in a row whose raw free was under the warn floor."""
    excess: int = 0
    """Samples in a row with room to regrow elastic memory."""
    ladder: Ladder = FOOT
    climbed: Level = Level.OK
    """The worst level for which a climb has reached the top since the device was last well."""
    acted_at: float = -1.0
    in_flight: Action | None = None
    due: Due | None = None
    degraded: Degraded | None = None
    capped: str | None = None
    lone_reload_at: float | None = None
    """When the one reload of an unknown loss was spent; it re-arms as a degraded device does."""
    state: State = State.OK


@dataclass(frozen=True, slots=True)
class Reloading:
    """A reload in progress. `device` asked for it at `before` idle free bytes and hopes for `margin` more.

    All three are None if it was not the policy that asked.
    """

    at: float
    device: int | None = None
    before: int | None = None
    margin: int | None = None


@dataclass(frozen=True, slots=True)
class PolicyState:
    """All devices, and what they share: the engine and its budget of reloads."""

    devices: tuple[DeviceState, ...]
    reloads: tuple[float, ...] = ()
    """When automatic reloads of the last hour began."""
    reloading: Reloading | None = None

    def put(self, device: int, state: DeviceState) -> "PolicyState":
        if self.devices[device] is state:
            return self
        devices = (*self.devices[:device], state, *self.devices[device + 1 :])
        return PolicyState(devices, self.reloads, self.reloading)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about one device now, and why, in words. `hold`: new requests must wait for memory."""

    at: float
    device: int
    state: State
    kind: TrendClass
    reason: str
    action: Action | None = None
    due: Due | None = None
    """Set while a reload waits for its moment."""
    hold: bool = False
    dry_run: bool = False


def mib(size: float) -> str:
    return f"{size / MIB:.0f} MiB"
