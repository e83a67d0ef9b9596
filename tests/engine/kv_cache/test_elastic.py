"""Books, arenas and ledger move together; what sequences hold is never touched."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import OutOfMemory
from engine.kv_cache.blocks import BlockPool
from engine.kv_cache.elastic import ElasticKv, StageMemory
from engine.kv_cache.geometry import KvGeometry
from engine.memory.arena import HostArena
from engine.memory.ledger import Ledger
from engine.memory.owners import Owner

PAGE = 1 << 12


class Cards:
    """Simulated cards of `total` bytes each."""

    def __init__(self, total):
        self.total = total
        self.rows = {}

    def resize(self, device, owner, size):
        held = sum(size for (at, other), size in self.rows.items() if at == device and other != owner)
        if held + size > self.total:
            raise OutOfMemory(device, owner, size, self.total - held)
        self.rows[device, owner] = size


def elastic_kv(n_blocks=20, minimum=5, layers=(2, 1), devices=(0, 1), dtype="int8", total=1 << 30):
    """Groups of 4 blocks (int8: 4 tokens, 4 heads of 64 bytes) over stages; (elastic, pool, stages, ledger)."""
    ledger = Ledger(sorted(set(devices)), Cards(total))
    stages = []
    for count, device in zip(layers, devices, strict=True):
        geometry = KvGeometry(count, 4, 64, dtype, granule=PAGE, block_tokens=4)
        arena = HostArena(ledger, device, Owner.KV_CACHE, geometry.address_granules(n_blocks) * PAGE, PAGE)
        stages.append(StageMemory(device, geometry, arena))
    pool = BlockPool(n_blocks, block_tokens=4, group_blocks=stages[0].geometry.group_blocks, minimum=minimum)
    return ElasticKv(pool, stages), pool, stages, ledger


def test_the_pool_takes_what_the_geometry_says():
    elastic, pool, stages, ledger = elastic_kv()
    assert pool.groups == 5
    for stage in stages:
        size = stage.geometry.pool_bytes(20)
        assert elastic.held[stage.device] == ledger.held(stage.device, Owner.KV_CACHE) == size
        assert elastic.elastic[stage.device] == size - stage.geometry.pool_bytes(5)
    assert elastic.share == 1


def test_shrinking_gives_at_least_what_was_asked_for_and_growing_takes_it_back():
    elastic, pool, _, ledger = elastic_kv()
    before = elastic.held
    returned = elastic.shrink(4 * PAGE + 1, device=0)
    assert returned[0] >= 4 * PAGE + 1
    assert returned[1] > 0
    assert pool.n_blocks == 12
    assert elastic.share == pytest.approx(7 / 15)
    assert {device: before[device] - returned[device] for device in before} == elastic.held
    assert elastic.grow({0: 1 << 30, 1: 1 << 30}) == returned
    assert elastic.held == before == {0: ledger.held(0), 1: ledger.held(1)}


def test_it_never_shrinks_below_the_minimum_or_what_sequences_hold():
    elastic, pool, stages, _ = elastic_kv()
    elastic.shrink(1 << 40)
    assert pool.n_blocks == 8
    assert elastic.held[0] >= stages[0].geometry.pool_bytes(pool.minimum)
    assert elastic.elastic[0] < stages[0].geometry.pool_bytes(4)
    elastic.grow({0: 1 << 30, 1: 1 << 30})
    for _ in range(13):
        pool.allocate()
    elastic.shrink(1 << 40)
    assert pool.n_blocks == 16
    assert sum(elastic.shrink(1).values()) == 0


def test_it_grows_no_further_than_the_room_on_the_tightest_device():
    elastic, pool, _, _ = elastic_kv()
    one_group = elastic.shrink(1)
    elastic.shrink(1 << 40)
    taken = elastic.grow({0: 1 << 30, 1: one_group[1] + PAGE})
    assert 0 < taken[1] <= one_group[1] + PAGE
    assert pool.n_blocks == 12


def test_a_card_that_is_full_after_all_ends_the_growth_and_leaves_the_books_in_order():
    elastic, pool, _, ledger = elastic_kv(total=1 << 20)
    elastic.shrink(1 << 40)
    ledger.charge(1, Owner.SCRATCH, (1 << 20) - ledger.held(1) - PAGE)
    before = elastic.held
    assert elastic.grow({0: 1 << 30, 1: 1 << 30}) == {0: 0, 1: 0}
    assert elastic.held == before
    assert pool.n_blocks == 8
    pool.audit([])


def test_a_plan_that_does_not_hold_leaves_nothing_behind():
    cards = Cards(1 << 17)
    ledger = Ledger([0], cards)
    geometry = KvGeometry(4, 4, 64, "f16", granule=PAGE, block_tokens=4)
    arena = HostArena(ledger, 0, Owner.KV_CACHE, geometry.address_granules(40) * PAGE, PAGE)
    pool = BlockPool(40, block_tokens=4, group_blocks=geometry.group_blocks, minimum=4)
    assert geometry.pool_bytes(40) > cards.total
    with pytest.raises(OutOfMemory):
        ElasticKv(pool, [StageMemory(0, geometry, arena)])
    assert (ledger.held(0), arena.mapped) == (0, 0)


class Lives(RuleBasedStateMachine):
    """Sequences write into their blocks while the pool breathes; two stages, the second on the same device."""

    def __init__(self):
        super().__init__()
        self.elastic, self.pool, self.stages, self.ledger = elastic_kv(18, 4, (2, 1), (0, 0))
        self.held = {}  # block → the byte it was filled with
        self.turn = 0

    def views(self, block):
        """The values of a block in every run of every stage, and its scales."""
        for stage in self.stages:
            geometry = stage.geometry
            values, scales = np.split(stage.arena.array, [geometry.scales_start(18) * PAGE])
            runs = values.reshape(geometry.runs, -1, geometry.run_bytes)
            yield runs[:, block]
            yield scales[block * geometry.scale_bytes : (block + 1) * geometry.scale_bytes]

    @precondition(lambda self: self.pool.available)
    @rule(label=st.booleans())
    def take(self, label):
        self.turn += 1
        block = self.pool.allocate()
        if label:
            self.pool.label(block, self.turn.to_bytes(4, "big"))
        for view in self.views(block):
            view[:] = self.turn % 251 + 1
        self.held[block] = self.turn % 251 + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data):
        block = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[block]
        self.pool.release(block)

    @rule(pages=st.integers(1, 40))
    def shrink(self, pages):
        before = self.elastic.held[0]
        returned = self.elastic.shrink(pages * PAGE)[0]
        assert self.elastic.held[0] == before - returned

    @rule(pages=st.integers(0, 40))
    def grow(self, pages):
        before = self.elastic.held[0]
        taken = self.elastic.grow({0: pages * PAGE})[0]
        assert taken <= pages * PAGE
        assert self.elastic.held[0] == before + taken

    @invariant()
    def what_is_held_is_whole_and_the_bytes_are_those_of_the_present_groups(self):
        self.pool.audit([[block] for block in self.held])
        for block, value in self.held.items():
            assert all((view == value).all() for view in self.views(block))
        present = set(range(self.pool.groups)) - set(self.pool.absent_groups)
        expected = sum(stage.geometry.bytes_of(present, 18) for stage in self.stages)
        assert self.elastic.held[0] == self.ledger.held(0) == expected


Lives.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase
