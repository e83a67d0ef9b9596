"""The twin itself, by hand: what everything else is held against."""

import numpy as np

from engine.kv_cache.storage import allocate_kv
from engine.ops import reference
from engine.ops.rows import Rows, Span


def test_attention_of_two_tokens():
    """Scores 0 and ln 3 / sqrt(1) give weights 1/4 and 3/4."""
    kv = allocate_kv("f32", 1, 1, 1, 1)
    rows = Rows.of([Span([0, 0], 0, [0])])
    k = np.array([0, np.log(3)], np.float32).reshape(2, 1, 1)
    v = np.array([8, 4], np.float32).reshape(2, 1, 1)
    reference.store(k, v, rows, kv, 0)
    out = reference.attention(np.ones((2, 1, 1), np.float32), rows, kv, 0)
    np.testing.assert_allclose(out.ravel(), [8, 5], rtol=1e-6)


def test_rmsnorm():
    x = np.array([[3, 4]], np.float32)
    np.testing.assert_allclose(
        reference.rmsnorm(x, np.array([1, 10], np.float32), 0.0), [[3 / 12.5**0.5, 40 / 12.5**0.5]], rtol=1e-6
    )


def test_silu_mul():
    np.testing.assert_allclose(
        reference.silu_mul(np.array([[0, 2, 7, 3]], np.float32)), [[0, 6 / (1 + np.exp(-2))]], rtol=1e-6
    )


def test_route():
    logits = np.log(np.array([[1, 4, 2, 3]], np.float32))
    chosen, shares = reference.route(logits, 2, False)
    assert chosen.tolist() == [[1, 3]]
    np.testing.assert_allclose(shares, [[0.4, 0.3]], rtol=1e-6)
    np.testing.assert_allclose(reference.route(logits, 2, True)[1], [[4 / 7, 3 / 7]], rtol=1e-6)


def test_experts():
    """Two experts of one unit each: share * down * silu(gate x) * up x."""
    x, gate_up = np.array([[2]], np.float32), np.array([[[0], [1]], [[1], [3]]], np.float32)
    down = np.array([[[9]], [[5]]], np.float32)
    out = reference.experts(x, np.array([[1, 0]]), np.array([[0.5, 0.5]], np.float32), gate_up, down)
    np.testing.assert_allclose(out, [[0.5 * 5 * 2 / (1 + np.exp(-2)) * 6]], rtol=1e-6)
