"""rmsnorm.cu, silu_mul.cu, route.cu against the NumPy twin."""

from typing import Any

import cupy as cp
import numpy as np
import pytest

from engine.ops import reference
from engine.ops.cuda.rmsnorm import Rmsnorm
from engine.ops.cuda.room import Room
from engine.ops.cuda.route import Route, Routing
from engine.ops.cuda.silu_mul import SiluMul
from engine.plan.scratch import ITEM_COUNT, route_buffers

HALF = 2.0**-10
"""One rounding to f16, and the approximate exponential."""


@pytest.mark.parametrize("width", [96, 128, 576, 4096, 5120, 12288])
def test_rmsnorm(kernels: Any, stream: Any, width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = rng.standard_normal((70, width)).astype(np.float32) * 30, rng.uniform(0.5, 2, width).astype(np.float32)
    rmsnorm = Rmsnorm(kernels)
    y = cp.full((70, width + 64), np.nan, cp.float16)
    rmsnorm(cp.asarray(x), cp.asarray(weight), 1e-5, y[:, :width], stream)
    wanted = reference.rmsnorm(x, weight, 1e-5)
    ours = cp.asnumpy(y)
    assert (np.abs(ours[:, :width] - wanted) <= HALF * np.abs(wanted) + 2.0**-24).all()
    assert np.isnan(ours[:, width:]).all()
    rows = np.array([69, 3, 3, 0], np.int32)
    picked = cp.full((4, width), np.nan, cp.float16)
    rmsnorm(cp.asarray(x), cp.asarray(weight), 1e-5, picked, stream, cp.asarray(rows))
    assert np.array_equal(cp.asnumpy(picked), ours[rows, :width])


@pytest.mark.parametrize(("m", "width"), [(1, 100), (33, 768), (3, 12288)])
def test_silu_mul(kernels: Any, stream: Any, m: int, width: int) -> None:
    gate_up = np.random.default_rng(m).standard_normal((m, 2 * width)).astype(np.float32) * 4
    gate_up[0, 0] = -200.0
    y = cp.full((m, width), np.nan, cp.float16)
    SiluMul(kernels)(cp.asarray(gate_up), y, stream)
    assert np.allclose(cp.asnumpy(y), reference.silu_mul(gate_up), rtol=2 * HALF, atol=1e-6)


@pytest.mark.parametrize(
    ("m", "experts", "used"), [(1, 8, 2), (5, 128, 8), (64, 128, 8), (300, 512, 10), (1000, 60, 4)]
)
def test_route(kernels: Any, stream: Any, m: int, experts: int, used: int) -> None:
    rng = np.random.default_rng(m)
    logits = rng.standard_normal((m, experts)).astype(np.float32) * 3
    logits[0, : experts // 2] = 1.0  # equals: the first are taken
    positions = np.arange(m, dtype=np.int32)
    positions[m - m // 4 :] = -1
    live = m - m // 4
    route, to = Route(kernels), Routing.of(Room.allocate([*route_buffers(m * used), ITEM_COUNT]), m, used, experts)
    for normalise in (True, False):
        route(cp.asarray(logits), cp.asarray(positions), normalise, to, stream)
        chosen, shares = cp.asnumpy(to.chosen), cp.asnumpy(to.shares)
        wanted, wanted_shares = reference.route(logits, used, normalise)
        assert np.array_equal(chosen[:live], wanted[:live])
        assert (chosen[live:] == -1).all()
        assert np.allclose(shares[:live], wanted_shares[:live], rtol=1e-5)
    count, items = int(to.item_count[0]), cp.asnumpy(to.items)
    tokens, pairs = cp.asnumpy(to.tokens), cp.asnumpy(to.pairs)
    seen = []
    for expert, first, size, _ in items[:count]:
        assert 0 < size <= to.rows_of_item
        for place in range(first, first + size):
            assert chosen.reshape(-1)[pairs[place]] == expert
            assert tokens[place] == pairs[place] // used
            seen.append(pairs[place])
    assert sorted(seen) == list(range(live * used))

    parts = rng.standard_normal((m * used, 192)).astype(np.float32)
    x = rng.standard_normal((m, 192)).astype(np.float32)
    y = cp.asarray(x)
    route.add(cp.asarray(parts), y, cp.asarray(positions), to, stream)
    grown = x + np.einsum("mu,muw->mw", shares, parts.reshape(m, used, 192))
    grown[live:] = x[live:]
    assert np.allclose(cp.asnumpy(y), grown, rtol=1e-5, atol=1e-5)
