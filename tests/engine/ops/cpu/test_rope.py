import numpy as np
import pytest

from engine.ops import reference
from engine.ops.backend import Heads, Rope
from engine.ops.cpu.rope import angles, rope
from tests.engine.ops.cpu.matrices import random

HEADS = Heads(3, 1, 24)


def run(qkv, positions, turn, threads=2):
    qkv = qkv.copy()
    cos, sin = angles(positions, turn.frequencies, turn.magnitude)
    rope(qkv, HEADS, cos, sin, turn.interleaved, threads)
    return qkv


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [12, 5])
def test_equals_the_twin_and_leaves_v_and_the_rest_alone(rng, interleaved, pairs):
    turn = Rope(1e4 ** (-np.arange(pairs) / pairs), 1.3, interleaved)
    qkv, positions = random(rng, 20, 5 * 24), rng.integers(0, 100_000, 20)
    q, k, v = reference.split_heads(run(qkv, positions, turn), HEADS)
    old_q, old_k, old_v = reference.split_heads(qkv, HEADS)
    for new, old in ((q, old_q), (k, old_k)):
        np.testing.assert_allclose(new, reference.rope(old, positions, turn), atol=1e-6)
        assert (new[..., 2 * pairs :] == old[..., 2 * pairs :]).all()
    assert (v == old_v).all()


def test_a_row_has_the_same_bits_in_every_batch(rng):
    turn = Rope(1e4 ** (-np.arange(12) / 12), 1.0, True)
    qkv, positions = random(rng, 40, 5 * 24), rng.integers(0, 9000, 40)
    alone = np.concatenate([run(qkv[i : i + 1], positions[i : i + 1], turn) for i in range(40)])
    assert (run(qkv, positions, turn) == alone).all()
    assert (run(qkv[5:12], positions[5:12], turn) == alone[5:12]).all()


def test_by_hand():
    """One pair, frequency 1, position 2: (1, 0) turns to (cos 2, sin 2)."""
    qkv = np.zeros((1, 5 * 24), np.float32)
    qkv[0, 0] = 1
    turned = run(qkv, np.array([2]), Rope(np.array([1.0]), 1.0, False))
    np.testing.assert_allclose(turned[0, :2], [np.cos(2), np.sin(2)], rtol=1e-6)
