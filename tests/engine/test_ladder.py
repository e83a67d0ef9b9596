"""Rungs on tiny cards: what each gives back, who is asked, what comes back when the engine is idle."""

import pytest

from engine.kv_cache.blocks import BlockPool
from engine.ladder import RUNGS, Ladder, NoCards
from engine.messages import Grow, Ledger, Trim
from tests.engine.tiny_cards import GROUP_BLOCKS, PAGE, TinyCards

GROUP = 2 * PAGE


@pytest.fixture
def cards():
    return TinyCards(total=100 * PAGE)


@pytest.fixture
def pool():
    return BlockPool(10 * GROUP_BLOCKS, block_tokens=4, group_blocks=GROUP_BLOCKS, minimum=2 * GROUP_BLOCKS)


@pytest.fixture
def ladder(cards, pool):
    return cards.ladder(pool)


def trim(ladder, rung, device=None, keep=None):
    return {(r.device, r.result, r.claimed_bytes) for r in ladder.trim(Trim(1, rung, device, keep))}


def test_each_rung_gives_back_what_it_claims_and_then_nothing(cards, ladder):
    cards.books.charge(1, "pool_cached", PAGE)
    claims = {
        "pools": PAGE,
        "stack_limit": 0,
        "cublas_workspace": 2 * PAGE,
        "graph_cache": 2 * PAGE,
        "elastic": 8 * GROUP,
    }
    assert list(claims) == list(RUNGS)
    for rung, claim in claims.items():
        before = {device: cards.free(device) for device in cards.devices}
        claimed = trim(ladder, rung, device=1)
        assert (1, "ok" if claim else "noop", claim) in claimed
        assert {(device, cards.free(device) - before[device]) for device, _, _ in claimed} == {
            (device, size) for device, _, size in claimed
        }
        assert (1, "noop", 0) in trim(ladder, rung, device=1)
    assert cards.free(1) - cards.free(0) == 4 * PAGE, "only elastic memory comes and goes on all devices at once"


def test_no_device_means_all(ladder):
    assert trim(ladder, "graph_cache") == {(0, "ok", 2 * PAGE), (1, "ok", 2 * PAGE)}


def test_what_is_not_there_is_refused_in_words(ladder):
    [result] = ladder.trim(Trim(1, "reload"))
    assert (result.result, result.message) == ("failed", f"there is no such rung; there are {', '.join(RUNGS)}")
    [result] = ladder.trim(Trim(1, "pools", 7))
    assert (result.device, result.result) == (7, "failed")
    assert "[0, 1]" in result.message


def test_elastic_memory_shrinks_to_what_may_stay_and_never_below_the_minimum(ladder, pool):
    assert trim(ladder, "elastic", 0, keep=5 * GROUP) == {(0, "ok", 3 * GROUP), (1, "ok", 3 * GROUP)}
    assert trim(ladder, "elastic", 0, keep=5 * GROUP) == {(0, "noop", 0)}
    held = [pool.allocate() for _ in range(4 * GROUP_BLOCKS)]
    assert trim(ladder, "elastic") == {(0, "ok", 3 * GROUP), (1, "ok", 3 * GROUP)}, "what sequences hold stays"
    for block in held:
        pool.release(block)
    trim(ladder, "elastic")
    assert pool.n_blocks == pool.minimum


def test_it_grows_as_far_as_every_device_keeps_its_reserve(cards, ladder, pool):
    trim(ladder, "elastic")
    assert [r.claimed_bytes for r in ladder.grow(Grow(1, bytes=3 * GROUP + 1))] == [-3 * GROUP] * 2
    cards.others[1] = cards.free(1) - 16 * PAGE - GROUP
    assert {(r.device, r.result, r.claimed_bytes) for r in ladder.grow(Grow(2))} == {
        (0, "ok", -GROUP),
        (1, "ok", -GROUP),
    }
    assert [r.result for r in ladder.grow(Grow(3, device=0))] == ["noop"]
    cards.others[1] = 0
    ladder.grow(Grow(4))
    assert pool.n_blocks == pool.capacity


def test_growing_leaves_room_for_what_is_still_to_come_back(cards, ladder, pool):
    """And counts what the pools would give."""
    for device in cards.devices:
        cards.others[device] = cards.free(device) - 16 * PAGE
        cards.books.charge(device, "pool_cached", 2 * PAGE)
    trim(ladder, "elastic", keep=6 * GROUP)
    trim(ladder, "graph_cache")
    ladder.grow(Grow(1))
    assert pool.n_blocks == pool.capacity
    assert cards.free(0) == 16 * PAGE


def test_a_card_that_was_low_when_ready_is_to_keep_what_it_had(cards, pool):
    cards.others[0] = 100 * PAGE - 4 * PAGE - 10 * GROUP - 5 * PAGE
    ladder = cards.ladder(pool)
    assert cards.free(0) == 5 * PAGE
    trim(ladder, "elastic")
    ladder.grow(Grow(1))
    assert pool.n_blocks == pool.capacity
    assert cards.free(0) == 5 * PAGE


def test_relief_goes_up_the_ladder_until_something_came_back(cards, ladder, pool):
    cards.books.charge(0, "pool_cached", PAGE)
    freed = []
    while True:
        before = cards.free(0)
        if not ladder.relieve(0):
            break
        freed.append(cards.free(0) - before)
    assert freed == [PAGE, 2 * PAGE, 2 * PAGE, *[GROUP] * 8]
    assert not ladder.relieve(5)


def test_what_was_taken_apart_comes_back_when_idle_and_not_from_the_reserve(cards, pool):
    ladder = cards.ladder(pool, quiet_s=30.0)
    assert ladder.idle_wait(0.0) is None
    trim(ladder, "cublas_workspace")
    trim(ladder, "graph_cache", device=0)
    wait = ladder.idle_wait(0.0)
    assert wait is not None
    assert wait > 0
    cards.others[1] = cards.free(1) - 16 * PAGE - PAGE
    ladder.restore(1000.0)
    assert (cards.missing(0), cards.missing(1)) == (0, 2 * PAGE)
    assert ladder.idle_wait(1010.0) == 20.0
    cards.others[1] = 0
    ladder.restore(1030.0)
    assert cards.missing(1) == 0
    assert ladder.idle_wait(1040.0) is None


def test_the_ledger_is_news_once(cards, ladder):
    assert ladder.news() is None
    trim(ladder, "graph_cache", device=1)
    news = ladder.news()
    assert isinstance(news, Ledger)
    assert [row["cuda_graphs"] for row in news.devices] == [2 * PAGE, 0]
    assert ladder.news() is None


def test_without_cards_there_is_nothing_to_take():
    ladder = Ladder(NoCards(), None, {})
    assert all(ladder.trim(Trim(1, rung)) == [] for rung in RUNGS)
    assert ladder.grow(Grow(1)) == []
    assert not ladder.relieve(0)
    assert ladder.idle_wait(0.0) is None
    assert ladder.news() is None
