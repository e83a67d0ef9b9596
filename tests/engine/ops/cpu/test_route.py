import numpy as np
import pytest

from engine.ops import reference
from engine.ops.cpu.route import route
from tests.engine.ops.cpu.matrices import random


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts", "used"), [(8, 2), (16, 4), (128, 8), (3, 3)])
def test_equals_the_twin(rng, experts, used, normalise):
    logits = random(rng, 50, experts)
    chosen, shares = route(logits, used, normalise)
    expected_chosen, expected_shares = reference.route(logits, used, normalise)
    assert (chosen == expected_chosen).all()
    np.testing.assert_allclose(shares, expected_shares, rtol=3e-6)


def test_equal_ones_are_taken_in_order():
    chosen, shares = route(np.zeros((1, 6), np.float32), 3, False)
    assert chosen.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(shares, 1 / 6, rtol=1e-6)


def test_a_row_has_the_same_bits_in_every_batch(rng):
    logits = random(rng, 33, 64)
    chosen, shares = route(logits, 4, True)
    for i in range(33):
        alone = route(logits[i : i + 1], 4, True)
        assert (alone[0] == chosen[i]).all()
        assert (alone[1] == shares[i]).all()
