"""Every mend that is named is tried here as a user would: its text is applied, and the new plan is sound."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from engine.plan.arrange import arrange
from engine.plan.ask import Ask, Card
from engine.plan.costs import MIB
from engine.plan.mend import cheapest_changes, plan_cards
from tests.engine.plan.asking import COSTS, applied, problems
from tests.engine.plan.test_arrange import all_splits, even_model

fast = settings(max_examples=40, deadline=None)


@fast
@given(problems())
def test_what_mends_makes_a_sound_plan(problem):
    needs, ask = problem
    plan = plan_cards(needs, ask, COSTS)
    assert len(plan.changes) <= 2
    for change in plan.changes:
        mended = plan_cards(needs, applied(ask, change), COSTS)
        assert mended.sound, change
        assert mended.changes == ()
    for card in plan.cards:
        assert (card.mend is not None) == (card.low or plan.pool_short)
        if plan.fits and card.low:
            assert card.mend == plan.changes[0]
    if plan.fits:
        assert plan.low == bool(plan.changes)
    elif not plan.changes and ask.kv_pool_mib is None:
        least = replace(ask, max_context=1, kv_dtype="int8", kv_pool_mib=None, shadow=False)
        for split in all_splits(needs, ask):
            assert not arrange(needs, replace(least, layer_split=split), COSTS).sound
        assert all("smaller model" in card.mend for card in plan.cards if card.low)


@fast
@given(problems())
def test_the_second_change_does_not_contain_the_first_and_costs_no_less(problem):
    needs, ask = problem
    plan = arrange(needs, ask, COSTS)
    if plan.sound:
        return
    changes = cheapest_changes(needs, ask, COSTS, plan)
    if len(changes) == 2:
        first, second = (change.flags.items() for change in changes)
        assert not first <= second
        assert changes[0].cost <= changes[1].cost + 0.01


def even_ask(**changes):
    """Two cards of 30 MiB for eight even layers: K and V of 64 tokens take 64 KiB a layer."""
    cards = tuple(Card(device, 30 * MIB, 0, 30 * MIB) for device in range(2))
    ask = Ask(cards=cards, kv_dtype="f16", reserve_mib=(4,), max_context=2560, prefill_rows=1, max_batch=1)
    return replace(ask, **changes)


@pytest.mark.parametrize(
    ("changes", "mend"),
    [
        ({"layer_split": (7, 1), "max_context": 2048}, ("--layer-split 4,4", "--max-context 1920")),
        ({"kv_pool_mib": 36}, ("--kv-pool-mib 33", "--vram-reserve-mib 2")),
        ({"reserve_mib": (12,)}, ("--max-context 2176", "--vram-reserve-mib 10")),
        ({"reserve_mib": (25,)}, ("--vram-reserve-mib 10", "--kv-dtype int8 --vram-reserve-mib 15")),
        ({"reserve_mib": (4, 12)}, ()),
        ({"reserve_mib": (4, 12), "layer_split": (4, 4)}, ("--layer-split 5,3", "--max-context 2176")),
        ({"reserve_later_mib": 12}, ()),
        ({"reserve_later_mib": 12, "layer_split": (4, 4)}, ("--layer-split 5,3", "--max-context 2176")),
        (
            {"reserve_later_mib": 25, "layer_split": (4, 4)},
            ("--vram-reserve-later-mib 10", "--kv-dtype int8 --vram-reserve-later-mib 15"),
        ),
    ],
)
def test_the_exact_flag_and_figure(changes, mend):
    plan = plan_cards(even_model(), even_ask(**changes), COSTS)
    assert plan.changes == mend
    assert plan.fits
    assert {card.mend for card in plan.cards if card.low} == set(mend[:1])


@pytest.mark.parametrize(
    ("changes", "mends"),
    [
        ({}, ("--max-context 1152", "--kv-dtype int8 --max-context 2048")),
        ({"kv_dtype": "f32"}, ("--kv-dtype int8 --max-context 2048", "--kv-dtype int8 --vram-reserve-mib 3")),
        ({"layer_split": (7, 1), "max_context": 1152}, ("--layer-split 4,4", "--max-context 128")),
        ({"max_context": 256, "kv_pool_mib": 1}, ("--kv-pool-mib 2",)),
        (
            {"reserve_mib": (11,)},
            ("--kv-dtype int8 --vram-reserve-mib 3", "--kv-dtype int8 --max-context 2048 --vram-reserve-mib 4"),
        ),
    ],
)
def test_what_does_not_fit_names_two_ways_out(changes, mends):
    cards = tuple(Card(device, 18 * MIB, 0, 18 * MIB) for device in range(2))
    plan = plan_cards(even_model(), even_ask(cards=cards, **changes), COSTS)
    assert not plan.fits
    assert plan.changes == mends


def test_a_model_too_large_says_what_lacks_where():
    cards = (Card(0, 9 * MIB, 0, 9 * MIB), Card(1, 8 * MIB, 0, 8 * MIB))
    plan = plan_cards(even_model(), even_ask(cards=cards), COSTS)
    assert plan.changes == ()
    assert plan.cards[1].mend == (
        "a smaller model or quantisation: device 1 lacks 6 MiB even with a context of 1 token"
    )
