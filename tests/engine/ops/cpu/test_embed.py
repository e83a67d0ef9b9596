import numpy as np
import pytest

from engine.ops import reference
from engine.ops.cpu.embed import embed
from tests.engine.ops.cpu.matrices import plain, quantised, values


@pytest.mark.parametrize("group", [16, 32, 0])
def test_equals_the_twin(rng, group):
    table = quantised(rng, 1, 50, 96, group) if group else plain(rng, 1, 50, 96)
    tokens = rng.integers(0, 50, 20)
    out = np.full((20, 96), np.nan, np.float32)
    embed(tokens, table, out)
    # One rounding where the twin has two.
    np.testing.assert_allclose(out, reference.embed(tokens, values(table)[0]), rtol=1e-6, atol=1e-6)


def test_ids_are_checked(rng):
    for tokens in ([50], [-1]):
        with pytest.raises(AssertionError):
            embed(np.array(tokens), plain(rng, 1, 50, 32), np.empty((1, 32), np.float32))
