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


class Holders(RuleBasedStateMachine):
    """Holders that allocate, share, label and release; a model of what must be in the pool beside it."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[list[int]] = []
        self.labels: dict[bytes, int] = {}

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


Holders.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHolders = Holders.TestCase
