"""What is known of each device at one moment, for whoever shows it: metrics, admin API, page, `ullage watch`.

Nothing here is older than it says: of a device without a fresh reading only what it was told at ready remains.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from watchdog.floors import Floors
from watchdog.snapshot import Health, Reading
from watchdog.state import State
from watchdog.trend import Forecast, Slopes, TrendClass

UNACCOUNTED = "unaccounted"


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device. Bytes; None is unknown. `reading` is a fresh one or None."""

    device: int
    uuid: str
    name: str
    health: Health
    stages: tuple[int, ...] | None = None
    reading: Reading | None = None
    lowest_free: int | None = None
    runtime_free: int | None = None
    idle_free: int | None = None
    floors: Floors | None = None
    kind: TrendClass = TrendClass.UNKNOWN
    slopes: Slopes | None = None
    confidence: float | None = None
    """None without a trend; 0 while it promises nothing."""
    forecast: Forecast | None = None
    ledger: Mapping[str, int] = field(default_factory=dict)
    """By owner; with `unaccounted` where own bytes are known, signed, so that the sum is own bytes."""
    drift: int | None = None
    """Where own bytes are unknown: what free memory has changed by since ready beyond what the ledger did."""
    state: State = State.DISABLED
    reason: str = ""

    @property
    def baseline_free(self) -> int | None:
        return None if self.floors is None else self.floors.baseline


@dataclass(frozen=True, slots=True)
class Status:
    """All devices at `at`, by the monotonic clock; `wall` is the same moment in Unix time."""

    at: float
    wall: float
    devices: tuple[DeviceStatus, ...] = ()
    reloading: bool = False


def accounted(ledger: Mapping[str, int], reading: Reading | None) -> dict[str, int]:
    """The ledger with what it does not explain of our own bytes, which is never clamped."""
    if not ledger or reading is None or reading.own is None:
        return dict(ledger)
    return {**ledger, UNACCOUNTED: reading.own - sum(ledger.values())}


def drift(reading: Reading | None, ledger: Mapping[str, int], ready: Reading, held_at_ready: int) -> int | None:
    """Change of free memory since ready that the ledger's change does not explain; below 0 for a loss."""
    if reading is None or reading.own is not None:
        return None
    return reading.free - ready.free + sum(ledger.values()) - held_at_ready


def as_json(status: DeviceStatus, at: float) -> dict[str, Any]:
    """A device at `at` as /admin/vram shows it: byte counts are plain integers, unknown is null."""
    reading, floors, slopes, forecast = status.reading, status.floors, status.slopes, status.forecast
    return {
        "device": status.device,
        "uuid": status.uuid,
        "name": status.name,
        "stages": None if status.stages is None else list(status.stages),
        **{name: getattr(reading, name, None) for name in ("total", "free", "used", "reserved", "own", "other")},
        "own_source": reading.own_source if reading else "none",
        "source": reading.source if reading else None,
        "age_seconds": status.health.age(at),
        "error": status.health.error,
        "idle_free": status.idle_free,
        "baseline_free": status.baseline_free,
        "floors": {name: getattr(floors, name, None) for name in ("warn", "trim", "reload")},
        "ledger": dict(status.ledger),
        "drift": status.drift,
        "state": status.state.value,
        "reason": status.reason,
        "tight": None if floors is None else floors.tight,
        "trend": {
            "class": status.kind.value,
            "bytes_per_request": slopes.per_request if slopes else None,
            "bytes_per_1k_prompt_tokens": slopes.per_1k_tokens if slopes else None,
            "bytes_per_second": slopes.per_second if slopes else None,
            "confidence": status.confidence,
            "forecast_seconds": forecast.seconds if forecast else None,
            "forecast_requests": forecast.requests if forecast else None,
        },
    }
