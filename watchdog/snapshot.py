"""What one sample of the machine says, apart from how well it could be read.

Two sides meet here. The *source* (NVML, the CUDA runtime, the simulation) gives a `Reading` per device and the
`Health` of getting it. The *service* gives `Work` (requests) and, per device, `Holdings` (the engine's ledger).
Everything is frozen; bytes are plain integers; what is not known is None and never zero. Times are seconds of one
monotonic clock that the caller owns.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MIB = 1 << 20
GIB = 1 << 30
GRANULE = 2 * MIB
"""The smallest piece in which a driver hands out device memory, hence the smallest change that means anything."""

MemorySource = Literal["nvml", "nvml_v1", "runtime", "system", "simulated"]
"""`nvml` is the v2 struct. All but it and `simulated` are fallbacks: v1 counts the driver's reserve as used, `runtime`
is the CUDA runtime's figure as the engine tells it, `system` the host's available memory on a card without its own."""
OwnSource = Literal["nvml", "host_pid", "simulated", "none"]


@dataclass(frozen=True, slots=True)
class Reading:
    """One device's memory at one moment.

    `used` and `reserved` are None where the source has only a free figure (the CUDA runtime). `own` is what the
    engine's process holds according to the source, not according to our ledger; `other` what all else holds.
    """

    at: float
    total: int
    free: int
    used: int | None = None
    reserved: int | None = None
    own: int | None = None
    other: int | None = None
    source: MemorySource = "nvml"
    own_source: OwnSource = "none"

    def __post_init__(self) -> None:
        if not self.total > 0 or not 0 <= self.free <= self.total:
            raise ValueError(f"free {self.free} of total {self.total} bytes is no memory reading")
        if self.used is not None and self.reserved is not None:
            said = self.used + self.free + self.reserved
            if said != self.total:
                raise ValueError(f"used + free + reserved = {said} bytes, but total = {self.total}")


@dataclass(frozen=True, slots=True)
class Health:
    """How the readings of one device went. `failures` counts those in a row, `failures_total` all of them."""

    attempted_at: float
    succeeded_at: float | None
    duration_s: float
    failures: int = 0
    failures_total: int = 0
    samples_total: int = 0
    error: str | None = None
    fallbacks_total: int = 0
    """Of the good samples, those that came from a fallback."""

    def age(self, now: float) -> float | None:
        """Seconds since the last good reading; None if there never was one."""
        return None if self.succeeded_at is None else now - self.succeeded_at


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """A distinct physical GPU or MIG instance. `reading` is the last good one, however old: ask `fresh`."""

    device: int
    uuid: str
    name: str
    reading: Reading | None
    health: Health
    lowest_free: int | None = None
    """Since the engine was last ready, over all samples: dips between two looks at the snapshot are kept."""
    holders: Mapping[int, int | None] | None = None
    """Bytes by process id at the latest look at the process list; None where the source does not tell."""

    def fresh(self, now: float, max_age_s: float) -> Reading | None:
        """The reading if it may be acted on: the last attempt succeeded and is at most `max_age_s` old."""
        age = self.health.age(now)
        if self.reading is None or age is None or age > max_age_s or self.health.failures > 0:
            return None
        return self.reading


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the sampler publishes: all devices, read one after another from `at` on."""

    sequence: int
    at: float
    devices: tuple[DeviceSnapshot, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """What the service was doing when a device was read. `finished` and `prompt_tokens` count since ready."""

    running: int
    finished: int
    prompt_tokens: int
    boundary: bool
    """The reading was taken at a step boundary with no trim, load or shrink in flight."""
    idle_since: float | None = None
    """Since when nothing has run or waited; None while something does."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """The part of the engine's memory that can be given back: shadow copy and KV blocks beyond the minimum, in bytes.

    `plan` was held at ready. `minimum` is never given up; `busy` holds blocks of live sequences.
    """

    plan: int = 0
    held: int = 0
    minimum: int = 0
    busy: int = 0
    blocked: bool = False
    """It may not grow: another device, which would have to give its share, has no room for it."""

    @property
    def half(self) -> int:
        return self.plan // 2

    def releasable(self, *, keep_half: bool) -> int:
        """Bytes a shrink could return now; under growth half of the plan is kept for work."""
        keep = max(self.minimum, self.busy, self.half if keep_half else 0)
        return max(0, self.held - keep)

    @property
    def missing(self) -> int:
        return 0 if self.blocked else max(0, self.plan - self.held)


@dataclass(frozen=True, slots=True)
class CappedOwner:
    """An owner that may grow, but only to `cap` bytes."""

    owner: str
    held: int
    cap: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """One device in the engine's ledger. `released` is what trims gave back minus what was regrown since ready."""

    generation: int
    released: int = 0
    elastic: Elastic = Elastic()
    capped: tuple[CappedOwner, ...] = ()
    ledger: Mapping[str, int] = field(default_factory=dict)
