"""The rungs of the watchdog's ladder that an engine can take without ending: memory given back, and taken again.

Everything here runs between two steps, with none launched. A rung says what the allocators believe it gave back; what
it really did is measured by the watchdog. What a rung took apart is put together again when the engine has been idle
for a while and the card has as much free beside it as it had at first: it never costs the reserve.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.errors import OutOfMemory
from engine.kv_cache.elastic import ElasticKv
from engine.messages import Grow, Ledger, RungResult, Trim

RUNGS = ("pools", "stack_limit", "cublas_workspace", "graph_cache", "elastic")
"""In order of cost."""

QUIET_S = 30.0
"""Nothing is put together again sooner after a rung, so that a climb is over and measured by then."""


class CardMemory(Protocol):
    """What a backend holds on its cards beside arrays."""

    @property
    def devices(self) -> Sequence[int]: ...

    @property
    def changes(self) -> int:
        """How often the ledger has changed."""

    def ledger(self) -> list[dict[str, int]]:
        """Bytes by owner, in the order of `devices`."""

    def free(self, device: int) -> int:
        """Bytes that an allocation could take, by the card's own account."""

    def cached(self, device: int) -> int:
        """Bytes that allocators keep for later and would give back when asked."""

    def drop(self, rung: str, device: int) -> int:
        """Take one of RUNGS but `elastic`; bytes given back. Raises OutOfMemory where that needs some first."""

    def missing(self, device: int) -> int:
        """Bytes that `restore` would take."""

    def restore(self, device: int) -> None:
        """Put together again what rungs took apart. Raises OutOfMemory."""


class NoCards:
    """The plain CPU."""

    devices: Sequence[int] = ()
    changes = 0

    def ledger(self) -> list[dict[str, int]]:
        return []

    def free(self, device: int) -> int:
        raise KeyError(device)

    cached = missing = free

    def drop(self, rung: str, device: int) -> int:
        raise KeyError(device)

    def restore(self, device: int) -> None:
        raise KeyError(device)


class Ladder:
    """`elastic` is the KV that comes and goes; `reserves` are the bytes to keep free on each device.

    Made when everything is loaded: a device that has less free than its reserve by then is to keep what it has.
    """

    def __init__(
        self, cards: CardMemory, elastic: ElasticKv | None, reserves: Mapping[int, int], quiet_s: float = QUIET_S
    ) -> None:
        self._cards = cards
        self._elastic = elastic
        self._keep = {device: min(reserves[device], cards.free(device)) for device in cards.devices}
        self._quiet_s = quiet_s
        self._taken_at: float | None = None
        self._told = cards.changes

    def trim(self, trim: Trim) -> list[RungResult]:
        """Take a rung on one device or on all of them."""
        devices = [device for device in self._cards.devices if trim.device in (None, device)]
        if trim.rung not in RUNGS:
            return [_failed(trim, f"there is no such rung; there are {', '.join(RUNGS)}")]
        if not devices and trim.device is not None:
            return [_failed(trim, f"there is no such device; there are {list(self._cards.devices)}")]
        return self._take(trim.rung, devices, trim.keep_bytes or 0)

    def grow(self, grow: Grow) -> list[RungResult]:
        """Take elastic memory again, as far as every device keeps what it is to keep; claimed bytes are negative."""
        if self._elastic is None:
            return []
        began = time.monotonic()
        room = {device: max(0, self._spare(device)) for device in self._cards.devices}
        if grow.bytes is not None:
            for device in room if grow.device is None else [grow.device]:
                room[device] = min(room[device], grow.bytes)
        taken = self._elastic.grow(room)
        seconds = time.monotonic() - began
        return [
            RungResult("elastic", device, "ok" if size else "noop", -size, seconds)
            for device, size in taken.items()
            if size or grow.device in (None, device)
        ]

    def relieve(self, device: int) -> bool:
        """An allocation was refused: take rung after rung until one has given something back there."""
        if device not in self._cards.devices:
            return False
        return any(self._gives(rung, device) for rung in RUNGS)

    def news(self) -> Ledger | None:
        """The ledger, if it has changed since the last time."""
        if self._cards.changes == self._told:
            return None
        self._told = self._cards.changes
        return Ledger(self._cards.ledger())

    def idle_wait(self, now: float) -> float | None:
        """Seconds after which an idle engine should call `restore`; None: never."""
        if self._taken_at is None or not any(self._cards.missing(device) for device in self._cards.devices):
            return None
        return max(0.0, self._taken_at + self._quiet_s - now)

    def restore(self, now: float) -> None:
        """Put together again what fits; what does not is tried after another while."""
        for device in self._cards.devices:
            if self._cards.missing(device) > 0 and self._spare(device) >= 0:
                try:
                    self._cards.restore(device)
                except OutOfMemory:  # somebody else was quicker
                    continue
        self._taken_at = now

    def _spare(self, device: int) -> int:
        """What is free beyond what is to be kept and what is to come back."""
        cards = self._cards
        return cards.free(device) + cards.cached(device) - cards.missing(device) - self._keep[device]

    def _gives(self, rung: str, device: int) -> bool:
        results = self._take(rung, [device], None)
        return any(result.claimed_bytes > 0 for result in results if result.device == device)

    def _take(self, rung: str, devices: Sequence[int], keep: int | None) -> list[RungResult]:
        """`keep`: elastic bytes that may stay; None: all but as little as can go."""
        self._taken_at = time.monotonic()
        if rung == "elastic":
            return self._shrink(devices, keep)
        return [self._drop(rung, device) for device in devices]

    def _drop(self, rung: str, device: int) -> RungResult:
        began = time.monotonic()
        try:
            size = self._cards.drop(rung, device)
        except OutOfMemory as error:
            return RungResult(rung, device, "failed", 0, time.monotonic() - began, str(error))
        return RungResult(rung, device, "ok" if size else "noop", size, time.monotonic() - began)

    def _shrink(self, devices: Sequence[int], keep: int | None) -> list[RungResult]:
        if self._elastic is None:
            return []
        began = time.monotonic()
        returned = dict.fromkeys(self._cards.devices, 0)
        for device in devices:
            excess = 1 if keep is None else self._elastic.elastic[device] - keep
            gone = self._elastic.shrink(excess, device) if excess > 0 else {}
            for each, size in gone.items():
                returned[each] += size
        seconds = time.monotonic() - began
        return [
            RungResult("elastic", device, "ok" if size else "noop", size, seconds)
            for device, size in returned.items()
            if size or device in devices
        ]


def _failed(trim: Trim, message: str) -> RungResult:
    return RungResult(trim.rung, trim.device or 0, "failed", 0, 0.0, message)
