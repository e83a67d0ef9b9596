"""What a card would hold beside the arrays of a model, on cards that do not exist: charges that come and go for real.

Workspace, graphs and the allocator's pool have no use on a CPU. They are charged to the simulated cards as a CUDA
engine would hold them, so that a rung of the ladder gives bytes back which another process can measure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.memory.ledger import Ledger
from engine.memory.owners import Owner
from engine.memory.simulated_gpus import SimulatedGpus
from engine.plan.arrange import Plan
from engine.plan.costs import COSTS, Costs
from engine.plan.graphs import GraphKeys


@dataclass(slots=True)
class _StageGraphs:
    layers: int
    planned: GraphKeys
    live: GraphKeys


class NominalMemory:
    """engine.ladder.CardMemory on simulated cards. Nothing is held before `hold`."""

    def __init__(
        self, plan: Plan, max_batch: int, ledger: Ledger, gpus: SimulatedGpus, *, few_graphs: bool, costs: Costs = COSTS
    ) -> None:
        self.devices = [card.device for card in plan.cards]
        self._plan = plan
        self._ledger = ledger
        self._gpus = gpus
        self._costs = costs
        self._workspace = {card.device: card.owners[Owner.CUBLAS_WORKSPACE] for card in plan.cards}
        last_layer = sum(plan.split)
        self._graphs: Mapping[int, Sequence[_StageGraphs]] = {
            card.device: [
                _StageGraphs(end - first, keys, keys)
                for first, end in card.layers
                for keys in [GraphKeys.of(max_batch, samples=end == last_layer, few=few_graphs)]
            ]
            for card in plan.cards
        }

    def hold(self, owners: Sequence[Owner]) -> None:
        """Charge these as planned, card by card. Raises OutOfMemory where a card has less free than when planned."""
        for card in self._plan.cards:
            for owner in owners:
                self._ledger.charge(card.device, owner, card.owners[owner])

    def free(self, device: int) -> int:
        return self._gpus.free(device)

    def cached(self, device: int) -> int:
        return self._ledger.held(device, Owner.POOL_CACHED)

    def ledger(self) -> list[dict[str, int]]:
        held = self._ledger.snapshot()
        return [held[device] for device in self.devices]

    @property
    def changes(self) -> int:
        return self._ledger.changes

    def touch_pools(self) -> None:
        """A prompt is read: the pool of every card keeps a granule from then on. Raises OutOfMemory."""
        for device in self.devices:
            if not self.cached(device):
                self._ledger.charge(device, Owner.POOL_CACHED, self._costs.granule)

    def drop(self, rung: str, device: int) -> int:
        owner = {
            "pools": Owner.POOL_CACHED,
            "cublas_workspace": Owner.CUBLAS_WORKSPACE,
            "graph_cache": Owner.CUDA_GRAPHS,
        }.get(rung)
        if owner is None:  # stack_limit: no kernel has local memory, so none was ever set aside
            return 0
        held = self._ledger.held(device, owner)
        if owner is Owner.CUDA_GRAPHS:
            for stage in self._graphs[device]:
                stage.live = stage.live.halved()
            left = self._graph_bytes(device)
        else:
            left = 0
        self._ledger.release(device, owner, held - left)
        return held - left

    def missing(self, device: int) -> int:
        return self._missing_workspace(device) + self._missing_graphs(device)

    def restore(self, device: int) -> None:
        """Raises OutOfMemory; what came back before that stays."""
        self._ledger.charge(device, Owner.CUBLAS_WORKSPACE, self._missing_workspace(device))
        self._ledger.charge(device, Owner.CUDA_GRAPHS, self._missing_graphs(device))
        for stage in self._graphs[device]:
            stage.live = stage.planned

    def _missing_workspace(self, device: int) -> int:
        return self._workspace[device] - self._ledger.held(device, Owner.CUBLAS_WORKSPACE)

    def _missing_graphs(self, device: int) -> int:
        planned = sum(self._size(stage.planned, stage.layers) for stage in self._graphs[device])
        return planned - self._ledger.held(device, Owner.CUDA_GRAPHS)

    def _graph_bytes(self, device: int) -> int:
        return sum(self._size(stage.live, stage.layers) for stage in self._graphs[device])

    def _size(self, keys: GraphKeys, layers: int) -> int:
        return self._costs.granules(keys.nbytes(self._costs, layers))
