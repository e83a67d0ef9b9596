"""The ledger adds up to the byte, and never runs ahead of its card."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import OutOfMemory
from engine.memory.ledger import Ledger
from engine.memory.owners import CHARGED, Owner


class SmallCard:
    """Holds at most 100 bytes a device."""

    def __init__(self):
        self.rows = {}

    def resize(self, device, owner, size):
        after = self.rows | {(device, owner): size}
        held = sum(size for (at, _), size in self.rows.items() if at == device)
        if sum(size for (at, _), size in after.items() if at == device) > 100:
            raise OutOfMemory(device, owner, size, 100 - held)
        self.rows = after


moves = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(CHARGED), st.integers(-60, 60)), max_size=40)


@given(moves=moves)
def test_what_is_held_is_what_was_charged_less_what_was_released(moves):
    card = SmallCard()
    ledger = Ledger((0, 1), card)
    held = {(device, owner): 0 for device in (0, 1) for owner in CHARGED}
    for device, owner, size in moves:
        if size < 0:
            size = max(size, -held[device, owner])
            ledger.release(device, owner, -size)
        else:
            total = sum(held[device, other] for other in CHARGED)
            if total + size > 100:
                with pytest.raises(OutOfMemory, match=f"device {device}: {owner} asked"):
                    ledger.charge(device, owner, size)
                continue
            ledger.charge(device, owner, size)
        held[device, owner] += size
    for device in (0, 1):
        assert ledger.snapshot()[device] == {owner: held[device, owner] for owner in CHARGED}
        assert ledger.held(device) == sum(held[device, owner] for owner in CHARGED)
        assert all(card.rows.get((device, owner), 0) == ledger.held(device, owner) for owner in CHARGED)


def test_more_than_is_held_cannot_be_released():
    ledger = Ledger([0])
    ledger.charge(0, Owner.WEIGHTS, 5)
    with pytest.raises(AssertionError, match="weights holds 5 bytes, 6 were released"):
        ledger.release(0, Owner.WEIGHTS, 6)
    assert ledger.held(0) == 5


def test_a_snapshot_is_plain_data_that_stays_as_it_was():
    ledger = Ledger([0])
    before = ledger.snapshot()
    ledger.charge(0, Owner.SCRATCH, 7)
    assert before[0]["scratch"] == 0
    row = ledger.snapshot()[0]
    assert row["scratch"] == 7
    assert all(type(owner) is str for owner in row)
    assert json.loads(json.dumps(row)) == row
    assert "unaccounted" not in row
