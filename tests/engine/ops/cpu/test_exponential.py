import numba
import numpy as np

from engine.ops.cpu.exponential import exponential, exponentials
from engine.ops.cpu.lanes import load, store


@numba.njit
def one_by_one(x, out):
    for i in range(len(x)):
        out[i] = exponential(x[i])


@numba.njit
def sixteen(x, out):
    for i in range(0, len(x), 16):
        store(out, i, exponentials(load(x, i)))


def run(function, x):
    out = np.full_like(x, np.nan)
    function(x, out)
    return out


def test_two_units_of_the_last_place():
    x = np.linspace(-86.9, 87.9, 1 << 16).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(run(sixteen, x) - exact) / np.spacing(exact.astype(np.float32))).max() <= 2


def test_both_forms_have_the_same_bits():
    x = np.random.default_rng(0).uniform(-100, 100, 1 << 12).astype(np.float32)
    assert (run(sixteen, x) == run(one_by_one, x)).all()


def test_ends():
    x = np.array([-np.inf, -1e30, -87.1, 0, 1e30, np.inf] + [0.0] * 10, np.float32)
    out = run(sixteen, x)
    assert (out[:3] == 0).all()
    assert out[3] == 1
    assert np.isfinite(out).all()
    assert (out[4:6] > 1e38).all()
