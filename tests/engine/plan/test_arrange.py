"""Plans of random small models against counting and against every other split there is."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given, settings

from engine.errors import ConfigError
from engine.kv_cache.geometry import KvGeometry
from engine.memory.owners import CHARGED, Owner
from engine.plan.arrange import SMALL_CONTEXT, arrange
from engine.plan.ask import Ask, Card
from engine.plan.costs import MIB, Costs
from engine.plan.demand import Demand
from tests.engine.plan.asking import COSTS, problems

fast = settings(max_examples=50, deadline=None)


def all_splits(needs, ask):
    n = needs.n_layers
    for cuts in combinations(range(1, n), len(ask.stages) - 1):
        yield tuple(end - start for start, end in zip([0, *cuts], [*cuts, n], strict=True))


def least_room(plan):
    """Room above the reserve of each card with the KV minimum only, smallest first."""
    shadow = [card.owners[Owner.SHADOW] for card in plan.cards]
    grown = [card.owners[Owner.KV_CACHE] - card.kv_minimum for card in plan.cards]
    rooms = [card.room - card.reserve for card in plan.cards]
    return sorted(map(sum, zip(rooms, shadow, grown, strict=True)))


@fast
@given(problems())
def test_every_byte_of_a_card_is_somebodys(problem):
    needs, ask = problem
    plan = arrange(needs, ask, COSTS)
    assert [card.device for card in plan.cards] == [card.device for card in ask.cards]
    for card, asked in zip(plan.cards, ask.cards, strict=True):
        assert set(card.owners) == set(CHARGED)
        assert all(size >= 0 for size in card.owners.values())
        assert card.total == asked.total == card.reserved + card.other + sum(card.owners.values()) + card.room
        assert card.total == asked.reserved + asked.other + asked.free
        assert card.low == (card.room < card.reserve)


@fast
@given(problems())
def test_the_layers_and_their_bytes_are_all_there(problem):
    needs, ask = problem
    plan = arrange(needs, ask, COSTS)
    layers = [layer for card in plan.cards for first, end in card.layers for layer in range(first, end)]
    assert layers == list(range(needs.n_layers))
    weights = sum(card.owners[Owner.WEIGHTS] for card in plan.cards)
    stored = sum(needs.layer_weights) + needs.embedding + needs.head
    stored += needs.head_shared if len(plan.cards) > 1 else 0
    assert 0 <= weights - stored < len(plan.cards) * COSTS.granule
    for card in plan.cards:
        geometries = [
            KvGeometry(end - first, needs.kv_heads, needs.head_dim, ask.kv_dtype, granule=COSTS.granule)
            for first, end in card.layers
        ]
        for size, blocks in (
            (card.owners[Owner.KV_CACHE], plan.kv_blocks),
            (card.kv_minimum, plan.kv_minimum_blocks),
        ):
            assert size == sum(geometry.pool_bytes(blocks) for geometry in geometries)
    assert plan.kv_minimum_blocks * 64 >= plan.max_context > (plan.kv_minimum_blocks - 1) * 64


@fast
@given(problems())
def test_all_room_above_the_reserve_is_the_pools(problem):
    needs, ask = problem
    plan = arrange(needs, ask, COSTS)
    assume(plan.sound)
    one_more = [
        sum(
            KvGeometry(end - first, needs.kv_heads, needs.head_dim, ask.kv_dtype, granule=COSTS.granule).pool_bytes(
                plan.kv_blocks + 1
            )
            for first, end in card.layers
        )
        for card in plan.cards
    ]
    too_much = any(
        card.room + card.owners[Owner.KV_CACHE] - size < card.reserve
        for card, size in zip(plan.cards, one_more, strict=True)
    )
    if ask.kv_pool_mib is None:
        assert too_much
    else:
        assert sum(card.owners[Owner.KV_CACHE] for card in plan.cards) <= ask.kv_pool_mib * MIB
        assert sum(one_more) > ask.kv_pool_mib * MIB


@fast
@given(problems(splits=False, pools=False, later=False, context=True))
def test_the_automatic_split_has_the_largest_smallest_room(problem):
    needs, ask = problem
    plan = arrange(needs, ask, COSTS)
    others = [arrange(needs, replace(ask, layer_split=split), COSTS) for split in all_splits(needs, ask)]
    assert plan.split in [other.split for other in others]
    assert plan.sound == any(other.sound for other in others)
    assert plan.fits == any(other.fits for other in others)
    if plan.sound:
        assert least_room(plan) == max(least_room(other) for other in others)


@fast
@given(problems(splits=False, pools=False, later=True, context=True))
def test_later_reserves_move_layers_only_when_nothing_else_fits(problem):
    needs, ask = problem
    plan = arrange(needs, ask, COSTS)
    without = arrange(needs, replace(ask, reserve_later_mib=None), COSTS)
    others = [arrange(needs, replace(ask, layer_split=split), COSTS) for split in all_splits(needs, ask)]
    assert plan.sound == any(other.sound for other in others)
    assert plan.fits == any(other.fits for other in others)
    if without.sound and arrange(needs, replace(ask, layer_split=without.split), COSTS).sound:
        assert plan.split == without.split


@fast
@given(problems(pools=False, later=False, context=False))
def test_a_context_that_was_not_given_is_the_longest_that_is_sound(problem):
    needs, ask = problem
    plan = arrange(needs, ask, COSTS)
    assert plan.max_context <= needs.trained_context
    if plan.sound and plan.max_context < needs.trained_context:
        longer = min(needs.trained_context, plan.max_context + 64)
        assert not arrange(needs, replace(ask, max_context=longer), COSTS).sound
    if not plan.sound:
        assert plan.max_context <= SMALL_CONTEXT
        if plan.max_context < min(SMALL_CONTEXT, needs.trained_context):
            longer = min(needs.trained_context, plan.max_context + 64)
            assert not arrange(needs, replace(ask, max_context=longer), COSTS).fits


@fast
@given(problems(splits=False, pools=False, later=True, context=False))
def test_a_context_is_shortened_before_layers_move(problem):
    needs, ask = problem
    plan = arrange(needs, ask, COSTS)
    without = arrange(needs, replace(ask, reserve_later_mib=None), COSTS)
    short = min(without.max_context, SMALL_CONTEXT)
    if arrange(needs, replace(ask, max_context=short, layer_split=without.split), COSTS).sound:
        assert plan.sound
        assert plan.split == without.split


@fast
@given(problems(pools=True, later=False, context=False))
def test_a_context_that_was_not_given_goes_into_the_pool_that_was(problem):
    needs, ask = problem
    plan = arrange(needs, ask, COSTS)
    assert plan.pool_short == (sum(card.kv_minimum for card in plan.cards) > ask.kv_pool_mib * MIB)
    if plan.pool_short:
        assert plan.max_context == min(64, needs.trained_context)


def even_model(n_layers=8):
    """Layers of 1 MiB, K and V of 64 KiB a block and layer, nothing else of weight."""
    return Demand(
        layer_weights=(MIB,) * n_layers,
        embedding=0,
        head=0,
        kv_heads=4,
        head_dim=64,
        trained_context=2560,
        row_scratch=1,
        logit_scratch=0,
    )


def test_a_later_reserve_that_nothing_else_meets_moves_layers():
    needs, free = even_model(), Costs(granule=1 << 15, context=0, modules=0, cublas_workspace=0, graph_node=0)
    cards = tuple(Card(device, 25 * MIB, 0, 25 * MIB) for device in range(2))
    ask = Ask(cards=cards, kv_dtype="f16", reserve_mib=(4,), max_context=2560, prefill_rows=1, max_batch=1)
    alike = arrange(needs, ask, free)
    assert (alike.split, alike.sound) == ((4, 4), True)
    kept = arrange(needs, replace(ask, reserve_later_mib=9), free)
    assert (kept.split, kept.sound) == ((4, 4), True)
    assert kept.kv_blocks < alike.kv_blocks
    moved = arrange(needs, replace(ask, reserve_later_mib=12), free)
    assert (moved.split, moved.sound) == ((5, 3), True)
    shorter = arrange(needs, replace(ask, reserve_later_mib=12, max_context=None), free)
    assert (shorter.split, shorter.sound) == ((4, 4), True)
    assert 2048 <= shorter.max_context < 2560


@fast
@given(problems())
def test_a_shadow_takes_at_most_half_of_the_room_and_whole_layers(problem):
    needs, ask = problem
    plan = arrange(needs, replace(ask, shadow=True), COSTS)
    for card in plan.cards:
        shadow = card.owners[Owner.SHADOW]
        held = sum(card.owners.values()) - shadow - card.owners[Owner.KV_CACHE] + card.kv_minimum
        room = card.total - card.reserved - card.other - held - card.reserve
        assert shadow <= max(0, room // 2)
        [(first, end)] = card.layers
        sums = [COSTS.granules(sum(needs.layer_shadow[first:last])) for last in range(first, end + 1)]
        assert shadow in sums


@fast
@given(problems(splits=False))
def test_two_stages_on_one_card_share_what_a_card_costs_once(problem):
    needs, ask = problem
    card = Card(0, 400 * MIB, 0, 400 * MIB)
    one = replace(ask, cards=(card,), stages=(0,), reserve_mib=(5,), reserve_later_mib=None)
    two = arrange(needs, replace(one, stages=(0, 0)), COSTS)
    [both] = two.cards
    assert len(both.layers) == 2
    assert both.owners[Owner.CONTEXT] == COSTS.context
    assert both.owners[Owner.CUBLAS_WORKSPACE] == 2 * COSTS.cublas_workspace
    assert both.owners[Owner.WEIGHTS] >= sum(needs.layer_weights) + needs.head_shared
    assert both.total == sum(both.owners.values()) + both.room


def test_what_cannot_be_meant_is_refused():
    cards = (Card(0, 40 * MIB, 0, 40 * MIB), Card(1, 20 * MIB, 0, 20 * MIB))
    for settings_, said in [
        ({"reserve_mib": (1, 2, 3)}, "--vram-reserve-mib 1,2,3: 3 figures for 2 cards"),
        ({"reserve_mib": (20,)}, "--vram-reserve-mib 20: device 1 has 20 MiB in all"),
        ({"reserve_mib": (39, 39)}, "device 1 has 20 MiB"),
        ({"reserve_later_mib": 20}, "--vram-reserve-later-mib 20: device 1 has 20 MiB"),
        ({"reserve_later_mib": 5, "cards": cards[:1]}, "no card without the first stage"),
    ]:
        with pytest.raises(ConfigError, match=said):
            Ask(**({"cards": cards, "kv_dtype": "f16", "reserve_mib": (5,)} | settings_))


@fast
@given(problems())
def test_what_the_model_does_not_have_is_refused(problem):
    needs, ask = problem
    with pytest.raises(
        ConfigError, match=f"--max-context .*: the model was trained for {needs.trained_context} tokens"
    ):
        arrange(needs, replace(ask, max_context=needs.trained_context + 1), COSTS)
    with pytest.raises(ConfigError, match=f"stages for a model of {needs.n_layers} layers"):
        arrange(needs, replace(ask, layer_split=None, stages=(*ask.stages, *[0] * 6)), COSTS)
