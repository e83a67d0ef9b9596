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
    requests: bool = True
    """Whether requests are seen; a watchdog without a service sees none, and says nothing per request."""


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


def as_json(status: Status) -> list[dict[str, Any]]:
    """The devices as /admin/vram shows them: byte counts are plain integers, unknown is null."""
    return [_device(device, status) for device in status.devices]


def _device(device: DeviceStatus, status: Status) -> dict[str, Any]:
    reading, floors = device.reading, device.floors
    return {
        "device": device.device,
        "uuid": device.uuid,
        "name": device.name,
        "stages": None if device.stages is None else list(device.stages),
        **{name: getattr(reading, name, None) for name in ("total", "free", "used", "reserved", "own", "other")},
        "own_source": reading.own_source if reading else "none",
        "source": reading.source if reading else None,
        "age_seconds": device.health.age(status.at),
        "error": device.health.error,
        "idle_free": device.idle_free,
        "baseline_free": device.baseline_free,
        "floors": {name: getattr(floors, name, None) for name in ("warn", "trim", "reload")},
        "ledger": dict(device.ledger),
        "drift": device.drift,
        "state": device.state.value,
        "reason": device.reason,
        "tight": None if floors is None else floors.tight,
        "trend": _trend(device, requests=status.requests),
    }


def _trend(device: DeviceStatus, *, requests: bool) -> dict[str, Any]:
    slopes, forecast = device.slopes, device.forecast
    return {
        "class": device.kind.value,
        "bytes_per_request": slopes.per_request if slopes and requests else None,
        "bytes_per_1k_prompt_tokens": slopes.per_1k_tokens if slopes and requests else None,
        "bytes_per_second": slopes.per_second if slopes else None,
        "confidence": device.confidence,
        "forecast_seconds": forecast.seconds if forecast else None,
        "forecast_requests": forecast.requests if forecast and requests else None,
    }
