"""Cards of a few hundred KiB, with all that a ladder can take from them, and an elastic pool over their memory."""

from engine.errors import OutOfMemory
from engine.kv_cache.elastic import ElasticKv, StageMemory
from engine.kv_cache.geometry import KvGeometry
from engine.ladder import Ladder
from engine.memory.arena import HostArena
from engine.memory.ledger import Ledger
from engine.memory.owners import Owner

PAGE = 1 << 12
GROUP_BLOCKS = 4
OWNERS = {
    "pools": Owner.POOL_CACHED,
    "cublas_workspace": Owner.CUBLAS_WORKSPACE,
    "graph_cache": Owner.CUDA_GRAPHS,
}


class TinyCards:
    """engine.ladder.CardMemory, and the card behind its ledger. Workspace and graphs are 2 pages each at first."""

    def __init__(self, devices=(0, 1), total=1 << 20):
        self.devices = devices
        self.total = dict.fromkeys(devices, total)
        self.others = dict.fromkeys(devices, 0)
        """Bytes that somebody else holds."""
        self.rows = {}
        self.books = Ledger(devices, self)
        for device in devices:
            self.restore(device)

    def resize(self, device, owner, size):
        more = size - self.rows.get((device, owner), 0)
        if more > self.free(device):
            raise OutOfMemory(device, owner, more, self.free(device))
        self.rows[device, owner] = size

    @property
    def changes(self):
        return self.books.changes

    def ledger(self):
        return list(self.books.snapshot().values())

    def free(self, device):
        held = sum(size for (at, _), size in self.rows.items() if at == device)
        return max(0, self.total[device] - held - self.others[device])

    def cached(self, device):
        return self.books.held(device, Owner.POOL_CACHED)

    def drop(self, rung, device):
        held = self.books.held(device, OWNERS[rung]) if rung in OWNERS else 0
        if held:
            self.books.release(device, OWNERS[rung], held)
        return held

    def missing(self, device):
        return sum(2 * PAGE - self.books.held(device, OWNERS[rung]) for rung in ("cublas_workspace", "graph_cache"))

    def restore(self, device):
        for rung in ("cublas_workspace", "graph_cache"):
            self.books.charge(device, OWNERS[rung], 2 * PAGE - self.books.held(device, OWNERS[rung]))

    def elastic(self, pool):
        """KV of one layer on each device: 4 blocks of 4 tokens are a group, which takes 2 pages, K and V."""
        stages = []
        for device in self.devices:
            geometry = KvGeometry(1, 4, 16, "f32", granule=PAGE, block_tokens=pool.block_tokens)
            assert geometry.group_blocks == GROUP_BLOCKS
            arena = HostArena(self.books, device, Owner.KV_CACHE, geometry.address_granules(pool.capacity) * PAGE, PAGE)
            stages.append(StageMemory(device, geometry, arena))
        return ElasticKv(pool, stages)

    def ladder(self, pool, reserve=16 * PAGE, quiet_s=30.0):
        return Ladder(self, self.elastic(pool), dict.fromkeys(self.devices, reserve), quiet_s)
