import numpy as np
import pytest

from engine.ops import reference
from engine.ops.cpu.experts import experts
from engine.ops.cpu.memory import Results, aligned_empty
from engine.ops.cpu.route import route
from tests.engine.ops.cpu.matrices import plain, quantised, random, values

HIDDEN, WIDTH, EXPERTS = 64, 32, 8


def layer(rng, quant):
    make = (lambda *shape: quantised(rng, *shape, 32)) if quant else (lambda *shape: plain(rng, *shape))
    return make(EXPERTS, 2 * WIDTH, HIDDEN), make(EXPERTS, HIDDEN, WIDTH)


def run(x, chosen, shares, gate_up, down, onto):
    onto = onto.copy()
    experts(x, chosen, shares, gate_up, down, onto, aligned_empty((2, 4 * HIDDEN)), Results())
    return onto


@pytest.mark.parametrize("quant", [True, False])
def test_equals_the_twin(rng, quant):
    gate_up, down = layer(rng, quant)
    x, onto = random(rng, 23, HIDDEN) / np.float32(8), random(rng, 23, HIDDEN)
    chosen, shares = route(random(rng, 23, EXPERTS), 2, True)
    expected = onto + reference.experts(x, chosen, shares, values(gate_up), values(down))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(run(x, chosen, shares, gate_up, down, onto), expected, atol=1e-5 * scale)


@pytest.mark.parametrize("quant", [True, False])
def test_a_row_has_the_same_bits_whoever_shares_its_experts(rng, quant):
    gate_up, down = layer(rng, quant)
    x, onto = random(rng, 33, HIDDEN), random(rng, 33, HIDDEN)
    chosen, shares = route(random(rng, 33, EXPERTS), 3, True)
    rows = [slice(i, i + 1) for i in range(33)]
    alone = np.concatenate([run(x[i], chosen[i], shares[i], gate_up, down, onto[i]) for i in rows])
    for batch in (2, 8, 33):
        places = rng.permutation(33)[:batch]
        together = run(x[places], chosen[places], shares[places], gate_up, down, onto[places])
        assert (together == alone[places]).all()
