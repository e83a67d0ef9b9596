"""A card that came out fuller than planned: planned again with the mend, it has its reserve despite the same error."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan.costs import MIB
from engine.plan.measured import mend_measured
from engine.plan.mend import plan_cards
from tests.engine.plan.asking import COSTS, applied, problems
from tests.engine.plan.test_mend import even_ask, even_model


@settings(max_examples=40, deadline=None)
@given(problem=problems(), errors=st.lists(st.integers(0, 2 * MIB), min_size=3, max_size=3))
def test_as_far_off_again_the_reserve_is_kept(problem, errors):
    needs, ask = problem
    plan = plan_cards(needs, ask, COSTS)
    if not plan.sound:
        return
    free = {card.device: card.room - error for card, error in zip(plan.cards, errors, strict=False)}
    mends = mend_measured(needs, ask, plan, free, COSTS)
    assert mends.keys() == {card.device for card in plan.cards if free[card.device] < card.reserve}
    for mend in set(mends.values()):
        again = plan_cards(needs, applied(ask, mend), COSTS)
        assert again.sound
        for after, before, error in zip(again.cards, plan.cards, errors, strict=False):
            if before.device in mends and after.reserve > before.reserve:
                assert after.room - error >= before.reserve


def test_only_later_cards_low_moves_no_layers():
    """The report that this is for: 203 MiB free on the later card where 700 were to be, and the flag for it."""
    needs, ask = even_model(), even_ask(max_context=640, reserve_mib=(7,))
    plan = plan_cards(needs, ask, COSTS)
    assert plan.sound
    room = plan.cards[1].room
    mends = mend_measured(needs, ask, plan, {0: plan.cards[0].room, 1: room - 3 * MIB}, COSTS)
    assert mends == {1: "--vram-reserve-later-mib 10"}
    again = plan_cards(needs, applied(ask, mends[1]), COSTS)
    assert again.split == plan.split
    assert again.cards[1].room - 3 * MIB >= 7 * MIB


def test_the_first_card_gets_a_reserve_of_its_own():
    needs, ask = even_model(), even_ask(max_context=640, reserve_mib=(7,))
    plan = plan_cards(needs, ask, COSTS)
    free = {card.device: card.room - 2 * MIB for card in plan.cards}
    both = mend_measured(needs, ask, plan, free, COSTS)
    assert set(both.values()) == {"--vram-reserve-mib 9,7 --vram-reserve-later-mib 9"}
    first = mend_measured(needs, ask, plan, free | {1: plan.cards[1].room}, COSTS)
    assert first == {0: "--vram-reserve-mib 9,7"}


def test_where_the_pool_cannot_give_the_context_has_to():
    needs, ask = even_model(), even_ask(max_context=2560, reserve_mib=(10,))
    plan = plan_cards(needs, ask, COSTS)
    assert plan.sound
    mends = mend_measured(needs, ask, plan, {0: plan.cards[0].room, 1: plan.cards[1].room - 2 * MIB}, COSTS)
    assert mends == {1: "--vram-reserve-later-mib 12 --max-context 2176"}
    assert plan_cards(needs, applied(ask, mends[1]), COSTS).sound


def test_a_card_with_its_reserve_needs_nothing():
    needs, ask = even_model(), even_ask(max_context=640)
    plan = plan_cards(needs, replace(ask, reserve_mib=(5,)), COSTS)
    assert mend_measured(needs, ask, plan, {0: 5 * MIB, 1: 5 * MIB}, COSTS) == {}
