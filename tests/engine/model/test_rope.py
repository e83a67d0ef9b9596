import math
from dataclasses import replace

import numpy as np
import pytest

from engine.model.rope import rope
from engine.model.rope_config import RopeConfig

PLAIN = RopeConfig(
    theta=10_000.0,
    dims=8,
    interleaved=True,
    scaling="none",
    factor=1.0,
    original_context=4096,
    attention_factor=1.0,
    beta_fast=32.0,
    beta_slow=1.0,
    frequency_factors=False,
)


class Factors:
    """Weights that hold one tensor."""

    def __init__(self, *values: float) -> None:
        self.values = np.array(values, np.float32)

    def numbers(self, name: str) -> np.ndarray:
        assert name == "rope_freqs.weight"
        return self.values


def test_plain():
    turn = rope(PLAIN, Factors())
    np.testing.assert_allclose(turn.frequencies, [1, 0.1, 0.01, 0.001])
    assert (turn.magnitude, turn.interleaved) == (1.0, True)


def test_factors_divide():
    turn = rope(replace(PLAIN, frequency_factors=True), Factors(1, 2, 4, 8))
    np.testing.assert_allclose(turn.frequencies, [1, 0.05, 0.0025, 0.000125])


def test_linear():
    turn = rope(replace(PLAIN, scaling="linear", factor=4.0), Factors())
    np.testing.assert_allclose(turn.frequencies, [0.25, 0.025, 0.0025, 0.00025])


def test_yarn():
    """Pair i turns 4096 / (2 pi 10^i) times: 652, 65, 6.5 and 0.65. 32 turns lie at pair 1.31 and one turn at pair
    2.81, so the ramp goes from pair 1 (kept) to pair 3 (divided)."""
    turn = rope(replace(PLAIN, scaling="yarn", factor=4.0), Factors())
    np.testing.assert_allclose(turn.frequencies, [1, 0.1, 0.01 * (0.5 + 0.5 / 4), 0.001 / 4])
    assert turn.magnitude == pytest.approx(1 + 0.1 * math.log(4))


def test_yarn_with_a_ramp_of_no_width():
    turn = rope(replace(PLAIN, scaling="yarn", factor=4.0, beta_fast=65.0, beta_slow=65.0), Factors())
    assert ((turn.frequencies > 0) & (turn.frequencies <= [1, 0.1, 0.01, 0.001])).all()
