"""The books of the block pool, and random use of them by many holders."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv_cache.blocks import BlockPool


def labelled_pool(n_blocks, n_labelled):
    """A pool with idle blocks labelled key 0, 1, …, longest idle first."""
    pool = BlockPool(n_blocks)
    for i in range(n_labelled):
        block = pool.allocate()
        pool.label(block, bytes([i]))
        pool.release(block)
    return pool


def test_free_blocks_go_before_cached_ones_and_the_longest_idle_goes_first():
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.label(first, b"first")
    pool.label(second, b"second")
    pool.release(second)
    pool.release(first)
    assert (pool.available, pool.cached, pool.used) == (3, 2, 0)
    assert pool.allocate() not in (first, second)
    assert pool.allocate() == second
    assert pool.find(b"second") is None
    assert pool.find(b"first") == first


def test_a_shared_block_is_free_after_its_last_holder():
    pool = labelled_pool(2, 1)
    block = pool.share(b"\0")
    assert pool.share(b"\0") == block
    assert (pool.holders(block), pool.cached, pool.used) == (2, 0, 1)
    pool.release(block)
    assert pool.used == 1
    pool.release(block)
    assert (pool.used, pool.cached) == (0, 1)
    pool.audit([])


def test_the_second_block_with_the_same_text_is_not_cached():
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.label(first, b"text")
    pool.label(second, b"text")
    pool.release(second)
    assert pool.cached == 0
    assert pool.find(b"text") == first
    pool.audit([[first]])


def test_a_forgotten_block_is_free_at_once():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.label(block, b"text")
    pool.forget(block)
    pool.release(block)
    assert (pool.cached, pool.available, pool.find(b"text")) == (0, 1, None)


def test_keys_tell_apart_everything_that_the_state_depends_on():
    tokens = list(range(64))
    pools = [BlockPool(1, "model f32 1"), BlockPool(1, "model f16 1"), BlockPool(1, "model f32 2")]
    keys = {pool.next_key(pool.root_key(scope), tokens) for pool in pools for scope in ("", "a", "b")}
    assert len(keys) == 9
    assert {len(key) for key in keys} == {16}
    [pool, *_] = pools
    root = pool.root_key("")
    assert pool.next_key(root, tokens) == BlockPool(1, "model f32 1").next_key(root, tokens)
    assert pool.next_key(root, tokens) != pool.next_key(root, [*tokens[:-1], 7])
    assert pool.next_key(pool.next_key(root, tokens), tokens) != pool.next_key(root, tokens)
    # Fingerprint and scope cannot run into each other.
    assert BlockPool(1, "a").root_key("bc") != BlockPool(1, "ab").root_key("c")


def test_a_scope_may_be_any_text():
    assert BlockPool(1).root_key("\ud800 é") != BlockPool(1).root_key("\ud801 é")


def test_adopted_blocks_are_taken_again_in_reverse():
    pool = labelled_pool(4, 1)
    assert pool.adopt(b"\0") is None
    adopted = [pool.adopt(key) for key in (b"best", b"good", b"fair", b"none")]
    assert adopted[3] is None
    assert [pool.allocate() for _ in range(3)] == adopted[2::-1]
    pool.audit([[block] for block in adopted[:3]])


@pytest.mark.parametrize("held", [[[0], [1]], [[0]], [[2], [1, 0]]])
def test_audit_finds_what_does_not_add_up(held):
    pool = BlockPool(3)
    blocks = [pool.allocate(), pool.allocate()]
    pool.label(blocks[0], b"text")
    pool.share(b"text")
    pool.audit([blocks, blocks[:1]])
    with pytest.raises(AssertionError, match="miscounted"):
        pool.audit(held)


def elastic_pool(n_blocks, group_blocks, minimum):
    return BlockPool(n_blocks, group_blocks=group_blocks, minimum=minimum)


def cache(pool, key):
    """A block that nobody holds, labelled."""
    block = pool.allocate()
    pool.label(block, key)
    pool.release(block)
    return block


def test_a_pool_that_was_told_nothing_does_not_shrink():
    pool = BlockPool(8)
    assert pool.shrink(1) == []
    assert (pool.n_blocks, pool.capacity, pool.absent_groups) == (8, 8, [])


def test_blocks_come_from_groups_that_are_in_use():
    pool = elastic_pool(12, 4, 0)
    first = [pool.allocate() for _ in range(6)]
    assert first == [0, 1, 2, 3, 4, 5]
    for block in first[:3]:
        pool.release(block)
    # Group 0 holds one block, group 1 two: the untouched group 2 is not begun while they have room.
    assert sorted(pool.allocate() for _ in range(5)) == [0, 1, 2, 6, 7]
    assert pool.allocate() == 8


def test_a_group_of_cached_text_is_filled_before_an_empty_one_is_begun():
    pool = elastic_pool(8, 4, 0)
    [held] = [pool.allocate()]
    cached = cache(pool, b"text")
    assert (held, cached) == (0, 1)
    pool.release(held)
    assert pool.allocate() in (0, 2, 3)
    assert pool.shrink(2) == [1]


def test_empty_groups_go_before_cached_text_and_the_longest_unused_text_goes_first():
    pool = elastic_pool(8, 2, 0)
    held = [pool.allocate() for _ in range(6)]
    for i, block in enumerate(held):
        pool.label(block, bytes([i]))
    for block in (4, 0, 2, 5, 1, 3):  # group 2 was used before group 0, group 0 before group 1
        pool.release(block)
    assert pool.shrink(1) == [3]
    assert pool.cached == 6
    assert pool.shrink(2) == [2, 0]
    assert (pool.n_blocks, pool.available, pool.absent_groups) == (2, 2, [0, 2, 3])
    assert {key for key, _ in pool.labelled()} == {b"\2", b"\3"}
    pool.audit([])


def test_a_group_that_a_sequence_holds_stays():
    pool = elastic_pool(6, 2, 0)
    held = [pool.allocate() for _ in range(5)]
    for block in (0, 2, 3):
        pool.release(block)
    assert pool.shrink(3) == [1]
    assert (pool.used, pool.available, pool.n_blocks) == (2, 2, 4)
    pool.audit([[1], [4]])
    assert held == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("minimum", "gone"), [(0, 3), (1, 2), (3, 2), (4, 1), (6, 1), (7, 0)])
def test_the_minimum_stays(minimum, gone):
    pool = elastic_pool(7, 3, minimum)  # groups of 3, 3 and 1
    assert len(pool.shrink(9)) == gone
    assert pool.n_blocks >= minimum


def test_what_grows_back_is_free_and_empty():
    pool = elastic_pool(6, 2, 2)
    cache(pool, b"text")
    assert pool.shrink(9) == [2, 1]
    assert [pool.allocate() for _ in range(2)] == [1, 0]
    assert pool.available == 0
    pool.grow(2)
    assert (pool.available, pool.n_blocks, pool.absent_groups) == (2, 4, [1])
    assert {pool.allocate(), pool.allocate()} == {4, 5}
    pool.audit([[0, 1], [4, 5]])


class Holders(RuleBasedStateMachine):
    """Holders that allocate, share, label and release; a model of what must be in the pool beside it."""

    def __init__(self):
        super().__init__()
        self.pool = self.make_pool()
        self.held: list[list[int]] = []
        self.labels: dict[bytes, int] = {}

    def make_pool(self):
        return BlockPool(6)

    @precondition(lambda self: self.pool.available)
    @rule()
    def allocate(self):
        before = {key for key, block in self.labels.items() if not self.pool.holders(block)}
        block = self.pool.allocate()
        assert not any(block in blocks for blocks in self.held)
        self.held.append([block])
        lost = {key for key in self.labels if self.pool.find(key) is None}
        assert lost <= before
        assert len(lost) <= 1
        for key in lost:
            assert self.labels.pop(key) == block

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.integers(0, 7))
    def label(self, data, key):
        [block] = data.draw(st.sampled_from(self.held))
        if block not in self.labels.values():
            self.pool.label(block, bytes([key]))
            self.labels.setdefault(bytes([key]), block)

    @precondition(lambda self: self.labels)
    @rule(data=st.data())
    def share(self, data):
        key = data.draw(st.sampled_from(sorted(self.labels)))
        assert self.pool.share(key) == self.labels[key]
        self.held.append([self.labels[key]])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        place = data.draw(st.integers(0, len(self.held) - 1))
        [block] = self.held.pop(place)
        self.pool.release(block)

    @invariant()
    def the_books_are_exact(self):
        self.pool.audit(self.held)
        assert dict(self.pool.labelled()) == self.labels
        assert self.pool.used == len({block for [block] in self.held})


class ElasticHolders(Holders):
    """The same over a pool whose groups come and go: 7 blocks in groups of 3, 3 and 1, never fewer than 2."""

    def make_pool(self):
        return elastic_pool(7, 3, 2)

    @rule(n_groups=st.integers(1, 3))
    def shrink(self, n_groups):
        held = {block // 3 for [block] in self.held}
        absent = set(self.pool.absent_groups)
        idle = [block for _, block in self.pool.labelled() if not self.pool.holders(block)]  # latest used first
        gone = self.pool.shrink(n_groups)
        assert not set(gone) & (held | absent)
        assert len(gone) <= n_groups
        lost = {key for key, block in self.labels.items() if block // 3 in gone}
        self.labels = {key: block for key, block in self.labels.items() if key not in lost}
        # No group went whose text was used later than that of a whole group that stayed and could have gone.
        latest = {block // 3: -place for place, block in reversed(list(enumerate(idle)))}
        stayed = {0, 1} - set(gone) - held - absent
        if self.pool.n_blocks - 3 >= self.pool.minimum or not gone:
            for group in gone:
                assert all(latest.get(group, -99) <= latest.get(other, -99) for other in stayed)

    @precondition(lambda self: self.pool.absent_groups)
    @rule(data=st.data())
    def grow(self, data):
        group = data.draw(st.sampled_from(self.pool.absent_groups))
        available = self.pool.available
        self.pool.grow(group)
        assert self.pool.available == available + (1 if group == 2 else 3)

    @invariant()
    def never_below_the_minimum(self):
        assert self.pool.n_blocks >= 2
        assert self.pool.n_blocks == 7 - sum(1 if group == 2 else 3 for group in self.pool.absent_groups)
        assert all(block // 3 not in self.pool.absent_groups for [block] in self.held)


for machine in (Holders, ElasticHolders):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHolders = Holders.TestCase
TestElasticHolders = ElasticHolders.TestCase
