import pytest

from engine.errors import OutOfMemory
from engine.memory.ledger import Ledger
from engine.memory.nominal import NominalMemory
from engine.memory.owners import Owner
from engine.memory.simulated_gpus import FILE_NAME, SimulatedGpus
from engine.plan import Ask, Demand, plan_cards, simulate_cards

MIB = 1 << 20
GIB = 1 << 30
NEEDS = Demand(
    layer_weights=(MIB,) * 60,
    embedding=MIB,
    head=MIB,
    kv_heads=2,
    head_dim=64,
    trained_context=4096,
    row_scratch=100,
    logit_scratch=MIB,
)


@pytest.fixture(params=[False, True])
def held(request, tmp_path):
    few = request.param
    cards = simulate_cards(tmp_path / FILE_NAME, [3 * GIB, 3 * GIB], 0.0)
    plan = plan_cards(NEEDS, Ask(cards=cards, kv_dtype="f16", few_graphs=few))
    gpus = SimulatedGpus.open(tmp_path / FILE_NAME)
    ledger = Ledger([0, 1], gpus)
    memory = NominalMemory(plan, 64, ledger, gpus, few_graphs=few)
    memory.hold([owner for owner in Owner if owner not in (Owner.KV_CACHE, Owner.UNACCOUNTED)])
    return memory, plan, gpus, few


def test_a_plan_carried_out_has_nothing_missing(held):
    memory, plan, gpus, _ = held
    for card in plan.cards:
        assert memory.missing(card.device) == 0
        assert gpus.free(card.device) == card.room + card.owners[Owner.KV_CACHE]


def test_graphs_go_by_halves_down_to_the_largest_and_all_come_back(held):
    memory, _, gpus, few = held
    before, claimed = gpus.free(1), []
    while size := memory.drop("graph_cache", 1):
        claimed.append(size)
        assert gpus.free(1) == before + sum(claimed) == before + memory.missing(1)
    assert (claimed == []) == few
    assert memory.ledger()[1]["cuda_graphs"] > 0
    memory.restore(1)
    assert (gpus.free(1), memory.missing(1)) == (before, 0)
    assert memory.drop("graph_cache", 1) == (0 if few else claimed[0])


def test_the_workspace_goes_and_comes_whole(held):
    memory, plan, gpus, _ = held
    workspace = plan.cards[0].owners[Owner.CUBLAS_WORKSPACE]
    assert memory.drop("cublas_workspace", 0) == workspace == memory.missing(0)
    assert memory.drop("cublas_workspace", 0) == 0
    gpus.take(0, "somebody", 3 * GIB)
    with pytest.raises(OutOfMemory):
        memory.restore(0)
    assert memory.missing(0) == workspace


def test_pools_fill_once_and_a_full_card_says_so(held):
    memory, _, gpus, _ = held
    before = gpus.free(0)
    memory.touch_pools()
    memory.touch_pools()
    assert before - gpus.free(0) == memory.cached(0) == 2 * MIB
    assert memory.drop("pools", 0) == 2 * MIB
    gpus.take(0, "somebody", 3 * GIB)
    with pytest.raises(OutOfMemory, match="pool_cached"):
        memory.touch_pools()
    assert memory.drop("stack_limit", 0) == 0
