import numpy as np
import pytest

from engine.ops import reference
from engine.ops.cpu.silu_mul import silu_mul
from tests.engine.ops.cpu.matrices import random


def run(x, threads=2):
    out = np.full((len(x), x.shape[1] // 2), np.nan, np.float32)
    silu_mul(x, out, threads)
    return out


@pytest.mark.parametrize("width", [1, 16, 33, 160])
def test_equals_the_twin(rng, width):
    x = random(rng, 20, 2 * width) * np.float32(4)
    np.testing.assert_allclose(run(x), reference.silu_mul(x), rtol=1e-6, atol=1e-30)


def test_far_ends():
    x = np.array([[-1e30, -100, -88, 0, 88, 1e30, 1, 1, 1, 1, 1, 1]], np.float32)
    np.testing.assert_allclose(run(x), reference.silu_mul(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [33, 64])
def test_a_row_has_the_same_bits_in_every_batch(rng, width):
    x = random(rng, 64, 2 * width)
    alone = np.concatenate([run(row[None]) for row in x])
    for batch in (2, 15, 16, 33, 64):
        places = rng.permutation(64)[:batch]
        assert (run(x[places]) == alone[places]).all()
