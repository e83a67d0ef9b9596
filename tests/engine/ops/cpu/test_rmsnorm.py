import numpy as np
import pytest

from engine.ops import reference
from engine.ops.backend import Heads
from engine.ops.cpu.rmsnorm import head_norm, rmsnorm
from tests.engine.ops.cpu.matrices import random


def run(x, weight, threads=2):
    out = np.full_like(x, np.nan)
    rmsnorm(x, weight, 1e-5, out, threads)
    return out


@pytest.mark.parametrize("width", [1, 8, 16, 40, 576, 577])
def test_equals_the_twin(rng, width):
    x, weight = random(rng, 20, width), random(rng, width)
    np.testing.assert_allclose(run(x, weight), reference.rmsnorm(x, weight, 1e-5), rtol=3e-6)


@pytest.mark.parametrize("width", [40, 64])
def test_a_row_has_the_same_bits_in_every_batch(rng, width):
    x, weight = random(rng, 64, width), random(rng, width)
    alone = np.concatenate([run(row[None], weight) for row in x])
    for batch in (2, 15, 16, 33, 64):
        places = rng.permutation(64)[:batch]
        assert (run(x[places], weight) == alone[places]).all()
        assert (run(x[places], weight, threads=1) == alone[places]).all()


def test_heads_of_q_and_k_in_place(rng):
    heads = Heads(4, 2, 40)
    qkv, q_weight, k_weight = random(rng, 17, 8 * 40), random(rng, 40), random(rng, 40)
    q, k, v = (part.copy() for part in reference.split_heads(qkv, heads))
    head_norm(qkv, heads, q_weight, k_weight, 1e-6, 2)
    new_q, new_k, new_v = reference.split_heads(qkv, heads)
    np.testing.assert_allclose(new_q, reference.rmsnorm(q, q_weight, 1e-6), rtol=3e-6)
    np.testing.assert_allclose(new_k, reference.rmsnorm(k, k_weight, 1e-6), rtol=3e-6)
    assert (new_v == v).all()
