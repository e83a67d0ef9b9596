"""Settings of the watchdog: the figures of the policy, and the floors an operator may set by hand."""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["on", "dry-run", "off"]


@dataclass(frozen=True, slots=True)
class FloorOverride:
    """Bytes of `--vram-floors-mib WARN,TRIM,RELOAD`; raises ValueError unless warn > trim > reload > 0."""

    warn: int
    trim: int
    reload: int

    def __post_init__(self) -> None:
        if not self.warn > self.trim > self.reload > 0:
            raise ValueError(
                f"floors must fall from warn over trim to reload, above 0: got {self.warn}, {self.trim}, {self.reload}"
            )


@dataclass(frozen=True, slots=True)
class WatchdogConfig:
    """Raises ValueError, naming the field, for a figure with which the policy would make no sense."""

    mode: Mode = "on"
    confirm: int = 3
    """Samples in a row that must say the same before a worse level counts."""
    trim_cooldown_s: float = 60.0
    """Between two ladders on one device."""
    reload_per_hour: int = 2
    """Automatic reloads, all devices together; reloads an operator asks for are not counted."""
    reload_horizon_s: float = 1800.0
    """A forecast inside it acts as if the device were under its trim floor."""
    reload_window_s: float = 60.0
    """How long a due reload may wait for an idle moment."""
    idle_s: float = 5.0
    """Nothing runs or waits for so long: an idle moment. The gap between two requests of a busy client is none."""
    bridge_s: float = 600.0
    """Under growth elastic memory shrinks by what this time needs."""
    rearm_s: float = 3600.0
    blind_after_s: float = 5.0
    """An older reading is never acted on."""
    floors: FloorOverride | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("on", "dry-run", "off"):
            raise ValueError(f"mode: on, dry-run or off, not {self.mode!r}")
        for name in ("confirm", "trim_cooldown_s", "reload_horizon_s", "bridge_s", "rearm_s", "blind_after_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, got {getattr(self, name)}")
        for name in ("reload_per_hour", "reload_window_s", "idle_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must not be below 0, got {getattr(self, name)}")
