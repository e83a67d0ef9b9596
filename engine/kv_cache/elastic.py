"""KV memory that can be given back while sequences go on: the books of the pool and the arenas behind it, as one.

A block has its K and V on every stage, so a group comes and goes on all devices at once. Everything here changes
memory: it runs between steps, with none launched.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import OutOfMemory
from engine.kv_cache.blocks import BlockPool
from engine.kv_cache.geometry import KvGeometry
from engine.memory.arena import Arena, Span


@dataclass(slots=True, eq=False)
class StageMemory:
    """The K and V of one stage's layers; `arena` has `geometry.address_granules(capacity)` granules, none mapped."""

    device: int
    geometry: KvGeometry
    arena: Arena
    _users: Counter[int] = field(default_factory=Counter)  # groups present, by granule of scales

    def map(self, group: int, capacity: int) -> int:
        """Bytes taken. Raises OutOfMemory; then nothing is."""
        taken = self.arena.grow(self._own(group, capacity))
        self._users.update(self.geometry.scale_granules(group, capacity))
        return taken

    def unmap(self, group: int, capacity: int) -> int:
        """Bytes given back."""
        self._users.subtract(self.geometry.scale_granules(group, capacity))
        return self.arena.shrink(self._own(group, capacity))

    def cost(self, group: int, capacity: int) -> int:
        """Bytes that `map` would take."""
        return sum(count for _, count in self._own(group, capacity)) * self.arena.granule

    def _own(self, group: int, capacity: int) -> list[Span]:
        """What this group has that no group counted in `_users` needs."""
        scales = self.geometry.scale_granules(group, capacity)
        return [
            *self.geometry.value_spans(group, capacity),
            *((granule, 1) for granule in scales if not self._users[granule]),
        ]


class ElasticKv:
    """`pool` with memory behind all of its groups, on every stage."""

    def __init__(self, pool: BlockPool, stages: Sequence[StageMemory]) -> None:
        """Takes the memory. Raises OutOfMemory; then nothing is held, which at load is a plan that did not hold."""
        self._pool = pool
        self._stages = stages
        taken: list[int] = []
        try:
            for group in range(pool.groups):
                self._map(group)
                taken.append(group)
        except OutOfMemory:
            for group in taken:
                self._unmap(group)
            raise

    @property
    def held(self) -> dict[int, int]:
        """Bytes by device."""
        held: Counter[int] = Counter()
        for stage in self._stages:
            held[stage.device] += stage.arena.mapped
        return dict(held)

    @property
    def elastic(self) -> dict[int, int]:
        """Bytes by device over what the minimum needs: what shrinking could give back with no sequence running."""
        elastic: Counter[int] = Counter()
        for stage in self._stages:
            elastic[stage.device] += stage.arena.mapped - stage.geometry.pool_bytes(self._pool.minimum)
        return {device: max(0, size) for device, size in elastic.items()}

    @property
    def share(self) -> float:
        """Present part, 0 to 1, of the blocks that the plan gave beyond the minimum; 1 where it gave none."""
        planned = self._pool.capacity - self._pool.minimum
        return (self._pool.n_blocks - self._pool.minimum) / planned if planned else 1.0

    def shrink(self, size: int, device: int | None = None) -> dict[int, int]:
        """Give back at least `size` bytes on `device` (on each, if None), or as much as can go; bytes by device."""
        returned = dict.fromkeys(self.held, 0)
        wanted = list(returned) if device is None else [device]
        while any(returned[each] < size for each in wanted):
            gone = self._pool.shrink(1)
            if not gone:
                break
            _add(returned, self._unmap(gone[0]))
        return returned

    def grow(self, room: Mapping[int, int]) -> dict[int, int]:
        """Take groups back while they cost no more than `room`, bytes by device; bytes taken by device.

        A device that refuses although it seemed to have room ends it.
        """
        taken = dict.fromkeys(self.held, 0)
        for group in self._pool.absent_groups:
            cost = self._cost(group)
            if any(taken[device] + cost[device] > room[device] for device in cost):
                break
            try:
                _add(taken, self._map(group))
            except OutOfMemory:
                break
            self._pool.grow(group)
        return taken

    def _cost(self, group: int) -> dict[int, int]:
        cost = dict.fromkeys(self.held, 0)
        for stage in self._stages:
            cost[stage.device] += stage.cost(group, self._pool.capacity)
        return cost

    def _map(self, group: int) -> dict[int, int]:
        taken = dict.fromkeys(self.held, 0)
        done: list[StageMemory] = []
        try:
            for stage in self._stages:
                taken[stage.device] += stage.map(group, self._pool.capacity)
                done.append(stage)
        except OutOfMemory:
            for stage in done:
                stage.unmap(group, self._pool.capacity)
            raise
        return taken

    def _unmap(self, group: int) -> dict[int, int]:
        given = dict.fromkeys(self.held, 0)
        for stage in self._stages:
            given[stage.device] += stage.unmap(group, self._pool.capacity)
        return given


def _add(total: dict[int, int], more: Mapping[int, int]) -> None:
    for device, size in more.items():
        total[device] += size
