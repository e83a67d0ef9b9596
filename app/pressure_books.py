"""What the engine of the moment holds on each device, in the watchdog's terms."""

from collections.abc import Mapping, Sequence

from engine.messages import DeviceReady, Ready
from watchdog.actions import Rung
from watchdog.runner import DevicePlan
from watchdog.snapshot import Elastic, Holdings

ELASTIC = ("kv_cache", "shadow")
"""Owners that shrink and grow again, also beyond what they were at ready."""
DROPPED = ("cublas_workspace", "cuda_graphs", "pool_cached")
"""Owners of what a rung may drop and the engine makes again. Beyond what they were at ready they are a loss."""


class Books:
    """One entry for each device of the source, known by its UUID; one that the engine does not use holds nothing."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids
        self._ready: Ready | None = None
        self._devices: dict[int, DeviceReady] = {}
        self._places: dict[int, int] = {}
        """Where the ledger's list has each device of the source."""
        self._returned: dict[int, int] = {}
        self.generation = 0

    def begin(self, generation: int, ready: Ready) -> None:
        """Another engine is ready."""
        self.generation = generation
        self._ready = ready
        self._returned.clear()
        places = {device.uuid: place for place, device in enumerate(ready.devices)}
        self._places = {here: places[uuid] for here, uuid in enumerate(self._uuids) if uuid in places}
        self._devices = {here: ready.devices[place] for here, place in self._places.items()}

    def plans(self) -> list[DevicePlan]:
        """What the engine promised of each device."""
        return [self._plan(self._devices.get(here)) for here in range(len(self._uuids))]

    def engine_device(self, here: int) -> int:
        """The engine's own number of a device."""
        return self._devices[here].device if here in self._devices else here

    def place_of(self, engine_device: int) -> int | None:
        """The source's number of a device that the engine calls so; None if the source does not know it."""
        return next((here for here, device in self._devices.items() if device.device == engine_device), None)

    def returned(self, device: int, rung: Rung, measured: int) -> None:
        """A rung gave back so many bytes of a device, as the source measured them."""
        if rung is Rung.STACK_LIMIT:  # the one whose effect no ledger tells
            self._returned[device] = self._returned.get(device, 0) + max(0, measured)

    def ledger(self, told: Sequence[Mapping[str, int]] | None, device: int) -> Mapping[str, int]:
        """Bytes by owner: as the engine told since, or as it was at ready."""
        if device not in self._devices:
            return {}
        return self._devices[device].ledger if told is None else told[self._places[device]]

    def holdings(self, told: Sequence[Mapping[str, int]] | None, blocks_used: int) -> list[Holdings]:
        """For each device of the source; `told` is the engine's latest ledger, if it has told one since ready."""
        return [self._holdings(here, told, blocks_used) for here in range(len(self._uuids))]

    def nothing(self) -> list[Holdings]:
        """There is no engine."""
        return [Holdings(self.generation)] * len(self._uuids)

    def _holdings(self, here: int, told: Sequence[Mapping[str, int]] | None, blocks_used: int) -> Holdings:
        device = self._devices.get(here)
        if device is None or self._ready is None:
            return Holdings(self.generation)
        now, then = self.ledger(told, here), device.ledger
        gone = {owner: then.get(owner, 0) - now.get(owner, 0) for owner in (*ELASTIC, *DROPPED)}
        released = sum(gone[owner] if owner in ELASTIC else max(0, gone[owner]) for owner in gone)
        shadow = then.get("shadow", 0)
        floor = then.get("kv_cache", 0) - device.elastic_bytes
        a_block = then.get("kv_cache", 0) / max(1, self._ready.kv_blocks)
        elastic = Elastic(
            plan=device.elastic_plan_bytes + shadow,
            held=max(0, now.get("kv_cache", 0) - floor) + now.get("shadow", 0),
            busy=max(0, int(blocks_used * a_block) - floor),
        )
        return Holdings(self.generation, released + self._returned.get(here, 0), elastic, ledger=now)

    @staticmethod
    def _plan(device: DeviceReady | None) -> DevicePlan:
        if device is None:
            return DevicePlan(reserve=0)
        return DevicePlan(device.reserve, device.largest_late_bytes, tuple(device.stages))
