"""A plan carried out on simulated cards: what stays free is what the plan said, and shrinking ends at its minimum."""

import pytest

from engine.gguf import open_gguf
from engine.kv_cache.blocks import BlockPool
from engine.kv_cache.elastic import ElasticKv, StageMemory
from engine.kv_cache.geometry import KvGeometry
from engine.memory.arena import HostArena
from engine.memory.ledger import Ledger
from engine.memory.owners import Owner
from engine.memory.simulated_gpus import FILE_NAME, SimulatedCard, SimulatedGpus
from engine.plan import COSTS, Ask, Card, file_demand, plan_cards
from tests.golden.cases import COMMITTED

GIB = 1 << 30


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "int8"])
@pytest.mark.parametrize("stages", [(0, 1), (0, 0)])
def test_the_card_is_as_full_as_planned(kv_dtype, stages, tmp_path):
    sizes = [2 * GIB, 3 * GIB][: len(set(stages))]
    cards = tuple(Card.empty(device, size) for device, size in enumerate(sizes))
    gguf = open_gguf(str(COMMITTED / "models/llama-Q4_1-s1/model.gguf"))
    needs = file_demand(gguf, max_batch=8)
    plan = plan_cards(needs, Ask(cards=cards, stages=stages, kv_dtype=kv_dtype, max_batch=8))
    assert plan.sound

    gpus = SimulatedGpus.create(tmp_path / FILE_NAME, [SimulatedCard(card.total, card.reserved) for card in cards])
    ledger = Ledger(range(len(cards)), gpus)
    for card in plan.cards:
        for owner, size in card.owners.items():
            if owner is not Owner.KV_CACHE:
                ledger.charge(card.device, owner, size)
    pool = BlockPool(plan.kv_blocks, group_blocks=plan.kv_group_blocks, minimum=plan.kv_minimum_blocks)
    memory = []
    for card in plan.cards:
        for first, end in card.layers:
            geometry = KvGeometry(end - first, needs.kv_heads, needs.head_dim, kv_dtype).coarse(plan.kv_blocks)
            size = geometry.address_granules(plan.kv_blocks) * COSTS.granule
            memory.append(StageMemory(card.device, geometry, HostArena(ledger, card.device, Owner.KV_CACHE, size)))
    elastic = ElasticKv(pool, memory)

    free = {card.device: gpus.free(card.device) for card in plan.cards}
    assert free == {card.device: card.room for card in plan.cards}
    assert ledger.snapshot() == {card.device: {str(o): size for o, size in card.owners.items()} for card in plan.cards}
    returned = elastic.shrink(1 << 50)
    assert pool.n_blocks >= plan.kv_minimum_blocks
    for card in plan.cards:
        assert gpus.free(card.device) == card.room + returned[card.device]
        assert card.kv_minimum <= ledger.held(card.device, Owner.KV_CACHE)
    room = {card.device: gpus.free(card.device) - card.reserve for card in plan.cards}
    assert elastic.grow(room) == returned
    assert {card.device: gpus.free(card.device) for card in plan.cards} == free
    gpus.close()
