"""The settings of everything around device memory: what is kept free, when the watchdog acts, how a reload goes.

The first half of the settings tree in app/settings.py, which reads them all.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.errors import ConfigError
from watchdog.config import FloorOverride, WatchdogConfig

MIB = 1 << 20
Mib = Annotated[int, Meta(ge=0, le=1 << 30)]
Layers = Annotated[int, Meta(ge=1, le=9999)]


class WatchdogSettings(msgspec.Struct, frozen=True, kw_only=True):
    vram_reserve_mib: Annotated[
        tuple[Mib, ...], Meta(description="MiB of each device to keep free: one figure, or one a device")
    ] = (512,)
    vram_reserve_later_mib: Annotated[
        Mib | None, Meta(description="MiB to keep free on devices after the first, in place of the above")
    ] = None
    vram_floors_mib: Annotated[
        tuple[Mib, Mib, Mib] | None,
        Meta(description="WARN,TRIM,RELOAD: MiB of idle free memory under which that is done; else from the reserve"),
    ] = None
    layer_split: Annotated[
        Literal["auto"] | tuple[Layers, ...],
        Meta(description="layers of each device, as in 23,25; auto leaves the tightest device the most room"),
    ] = "auto"
    watchdog: Annotated[
        Literal["on", "dry-run", "off"],
        Meta(description="act on device memory, only say what would be done, or only show"),
    ] = "on"
    watchdog_confirm: Annotated[
        Annotated[int, Meta(ge=1, le=1000)], Meta(description="samples in a row that must agree before it acts")
    ] = 3
    trim_cooldown: Annotated[
        Annotated[float, Meta(gt=0, le=1e7)], Meta(description="seconds between two rounds of trims on one device")
    ] = 60.0
    reload_per_hour: Annotated[
        Annotated[int, Meta(ge=0, le=3600)], Meta(description="reloads that the watchdog may start within an hour")
    ] = 2
    reload_horizon: Annotated[
        Annotated[float, Meta(gt=0, le=1e7)],
        Meta(description="seconds: a forecast nearer than this counts as being under the trim floor"),
    ] = 1800.0
    reload_window: Annotated[
        Annotated[float, Meta(ge=0, le=1e7)], Meta(description="seconds that a due reload waits for an idle moment")
    ] = 60.0
    reload_carry_mib: Annotated[
        Mib | None,
        Meta(description="MiB of host memory for what a reload carries over; else at most half of what is available"),
    ] = None
    reload_readiness: Annotated[
        Literal["hold", "shed"],
        Meta(description="/ready during a reload: hold stays 200, shed says 503 so that others get the requests"),
    ] = "hold"
    hang_seconds: Annotated[
        Annotated[float, Meta(gt=0, le=1e7)],
        Meta(description="seconds without a step after which an engine with work hangs, if its steps are short"),
    ] = 30.0
    simulate_gpus: Annotated[
        str | None, Meta(description="cards to pretend to have, as in 2x16GiB; the CPU computes")
    ] = None
    simulate_release_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=1e4)],
        Meta(description="seconds until a simulated card has back what a dead process held"),
    ] = 0.15
    faults: Annotated[
        str, Meta(description="faults to have on purpose; only with --simulate-gpus or ULLAGE_ALLOW_FAULTS=1")
    ] = ""

    def watchdog_config(self) -> WatchdogConfig:
        return WatchdogConfig(
            mode=self.watchdog,
            confirm=self.watchdog_confirm,
            trim_cooldown_s=self.trim_cooldown,
            reload_per_hour=self.reload_per_hour,
            reload_horizon_s=self.reload_horizon,
            reload_window_s=self.reload_window,
            floors=self._floors(),
        )

    def device_config(self) -> dict[str, Any]:
        """The fields of an EngineConfig that say how devices are used."""
        return {
            "layer_split": None if self.layer_split == "auto" else self.layer_split,
            "vram_reserve_mib": self.vram_reserve_mib,
            "vram_reserve_later_mib": self.vram_reserve_later_mib,
            "faults": self.faults,
        }

    def _floors(self) -> FloorOverride | None:
        if self.vram_floors_mib is None:
            return None
        warn, trim, reload = (mib * MIB for mib in self.vram_floors_mib)
        return FloorOverride(warn, trim, reload)


OF_DEVICES = (
    "vram_reserve_mib",
    "vram_reserve_later_mib",
    "vram_floors_mib",
    "watchdog",
    "watchdog_confirm",
    "trim_cooldown",
    "reload_per_hour",
    "reload_horizon",
    "reload_window",
)
"""Read where there is a device. On the plain CPU they are accepted, so that one file of settings serves both."""


def check(settings: WatchdogSettings, *, faults_allowed: bool) -> None:
    """Raises ConfigError for what makes no sense on any machine."""
    if settings.vram_floors_mib is not None:
        try:
            settings.watchdog_config()
        except ValueError:
            written = ",".join(map(str, settings.vram_floors_mib))
            raise ConfigError(
                f"--vram-floors-mib {written}: expected WARN,TRIM,RELOAD, each lower than the one before and above 0"
            ) from None
    if not settings.vram_reserve_mib:
        raise ConfigError("--vram-reserve-mib: expected one figure, or one a device")
    if settings.faults and settings.simulate_gpus is None and not faults_allowed:
        raise ConfigError(
            "--faults: breaks things on purpose, so it is taken only with --simulate-gpus or ULLAGE_ALLOW_FAULTS=1"
        )


def unread(settings: WatchdogSettings) -> list[str]:
    """Names that were set and that nothing reads for want of a device. Raises ConfigError for those that may not be."""
    if settings.simulate_gpus is not None:
        return []
    defaults = WatchdogSettings()
    fields = WatchdogSettings.__struct_fields__
    changed = [name for name in fields if getattr(settings, name) != getattr(defaults, name)]
    for name in ("layer_split", "simulate_release_seconds"):
        if name in changed:
            raise ConfigError(f"--{name.replace('_', '-')}: nothing reads it without --simulate-gpus")
    return [name for name in OF_DEVICES if name in changed]
