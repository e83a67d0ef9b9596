"""linear.cu, embed.cu against dequantised weights in float64, over every format, kernel, epilogue and awkward size.

Tolerance: both operands are rounded to f16 (2^-12 of a value on average a quarter of that), so the relative error of
a sum over k is about 3e-4 whatever k is; 6e-4 holds it with room and is far under any mistake of a code, scale or
position.
"""

from typing import Any

import cupy as cp
import numpy as np
import pytest

from engine.gguf.quants import QUANTS, QuantType, dequantise
from engine.ops.cuda.embed import Embed
from engine.ops.cuda.layout import FORMATS
from engine.ops.cuda.linear import Epilogue, Groups, Linear
from engine.ops.cuda.weight import Weight, from_host
from tests.engine.ops.cuda.weights import random_matrix

CLOSE = 6e-4
ALL = [pytest.param(quant, id=quant.name) for quant in FORMATS]


def error(ours: Any, wanted: Any) -> float:
    assert not np.isnan(ours).any()
    return float(np.linalg.norm(ours - wanted) / np.linalg.norm(wanted))


def activations(m: int, w: Weight, seed: int = 1) -> tuple[np.ndarray, Any]:
    """x [m, k] as float64, and on the device as f16, with numbers beyond k that must not matter."""
    x = np.random.default_rng(seed).standard_normal((m, w.k_padded + 8)).astype(np.float16)
    return x[:, : w.k].astype(np.float64), cp.asarray(x)


def matrix(quant: QuantType, rows: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    raw = random_matrix(quant, rows, k, seed)
    return raw, dequantise(raw, quant, (rows, k)).astype(np.float64)


def product(linear: Linear, w: Weight, x: Any, stream: Any, rows: int | None = None) -> np.ndarray:
    y = cp.full((x.shape[0], rows or w.rows), np.nan, cp.float32)
    linear(w, x, y, stream)
    return cp.asnumpy(y)


@pytest.mark.parametrize("quant", ALL)
def test_expand_and_embed(kernels: Any, stream: Any, quant: QuantType) -> None:
    rows, k = (37, 512) if QUANTS[quant].block_elements != 32 else (37, 544)
    raw, wanted = matrix(quant, rows, k)
    w = from_host([raw], quant, rows, k, kernels.limits)
    embed = Embed(kernels, FORMATS[quant])
    y = cp.full((rows, k), np.nan, cp.float16)
    embed.expand(w, y, stream)
    assert error(cp.asnumpy(y).astype(np.float64), wanted) < CLOSE
    tokens = np.array([0, 36, 7, 8, 15, 16, 31], np.int32)
    z = cp.full((len(tokens), k), np.nan, cp.float32)
    embed(w, cp.asarray(tokens), z, stream)
    assert error(cp.asnumpy(z), wanted[tokens]) < CLOSE


@pytest.mark.parametrize("quant", ALL)
def test_against_float64_and_row_invariance(kernels: Any, stream: Any, quant: QuantType) -> None:
    linear = Linear(kernels, FORMATS[quant])
    small = QUANTS[quant].block_elements
    shapes = [(16, 256), (48, 2304), (200, 1024)] + ([(33, 96), (250, 1568)] if small <= 32 else [])
    shapes += [(32 * kernels.limits.multiprocessors + 16, 512)] if quant in (QuantType.Q4_K, QuantType.Q5_1) else []
    for rows, k in shapes:
        raw, wanted = matrix(quant, rows, k)
        w = from_host([raw], quant, rows, k, kernels.limits)
        x, device_x = activations(200, w)
        first: np.ndarray | None = None
        for m in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 200):
            y = product(linear, w, device_x[:m], stream)
            assert error(y, x[:m] @ wanted.T) < CLOSE, (rows, k, m)
            first = y if m == 200 else first
        assert first is not None
        for m in (1, 2, 8, 9, 17, 33, 64, 65):
            for start in (0, 3):
                part = product(linear, w, device_x[start : start + m], stream)
                assert np.array_equal(part, first[start : start + m]), (rows, k, m, start)


def test_the_tile_kernel_gives_the_same_bits(kernels: Any, stream: Any) -> None:
    """With enough row tiles, 33 rows and more go through linear_tile, fewer through linear_rows."""
    rows, k = 128 * -(-kernels.limits.multiprocessors // 2), 1024
    for quant in (QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0):
        raw = np.tile(random_matrix(quant, 128, k), rows // 128)
        wanted = dequantise(raw[: len(raw) * 128 // rows], quant, (128, k)).astype(np.float64)
        w = from_host([raw], quant, rows, k, kernels.limits)
        linear = Linear(kernels, FORMATS[quant])
        x, device_x = activations(130, w)
        whole = product(linear, w, device_x, stream)
        assert error(whole[:, :128], x @ wanted.T) < CLOSE
        assert np.array_equal(whole[:, :128], whole[:, -128:])
        for m, start in ((1, 129), (16, 5), (64, 0), (100, 30)):
            assert np.array_equal(product(linear, w, device_x[start : start + m], stream), whole[start : start + m])


@pytest.mark.parametrize("m", [1, 8, 20, 64, 150])
def test_epilogues(kernels: Any, stream: Any, m: int) -> None:
    quant, rows, k = QuantType.Q4_K, 1008, 1024
    linear = Linear(kernels, FORMATS[quant])
    (gate_raw, gate), (up_raw, up) = matrix(quant, rows, k, 1), matrix(quant, rows, k, 2)
    w = from_host([gate_raw], quant, rows, k, kernels.limits)
    x, device_x = activations(m, w)
    bias = np.random.default_rng(5).standard_normal(rows).astype(np.float32)
    y = cp.full((m, rows + 8), np.nan, cp.float16)
    linear(w, device_x, y, stream, Epilogue.STORE_F16, bias=cp.asarray(bias))
    y = cp.asnumpy(y).astype(np.float64)
    assert np.isnan(y[:, rows:]).all()
    assert error(y[:, :rows], x @ gate.T + bias) < CLOSE
    base = np.random.default_rng(6).standard_normal((m, rows)).astype(np.float32)
    residual = cp.asarray(base)
    linear(w, device_x, residual, stream, Epilogue.ADD_F32)
    assert error(cp.asnumpy(residual) - base, x @ gate.T) < CLOSE
    pair = from_host([gate_raw, up_raw], quant, rows, k, kernels.limits, gated=True)
    h = cp.full((m, rows), np.nan, cp.float16)
    linear(pair, device_x, h, stream, Epilogue.SILU_F16)
    g, u = x @ gate.T, x @ up.T
    assert error(cp.asnumpy(h).astype(np.float64), g / (1 + np.exp(-g)) * u) < 2 * CLOSE


@pytest.mark.parametrize("rows_of_item", [8, 64])
def test_grouped(kernels: Any, stream: Any, rows_of_item: int) -> None:
    """Items of several experts; places name rows of x and of y; rows that no item names stay as they are."""
    quant, rows, k, experts, m = QuantType.Q4_K, 96, 512, 5, 70
    linear = Linear(kernels, FORMATS[quant])
    pairs = [matrix(quant, rows, k, seed) for seed in range(experts)]
    w = from_host([raw for raw, _ in pairs], quant, rows, k, kernels.limits)
    x, device_x = activations(m, w)
    rng = np.random.default_rng(9)
    counts, places = [3, 0, rows_of_item + 1, 8, 1], []
    items = []
    for expert, count in enumerate(counts):
        for first in range(0, count, rows_of_item):
            items.append((expert, sum(counts[:expert]) + first, min(rows_of_item, count - first), 0))
        places += [expert] * count
    x_rows, y_rows = rng.integers(0, m, len(places)), rng.permutation(100)[: len(places)]
    y = cp.full((100, rows), np.nan, cp.float32)
    padded = items + [(0, 0, 0, 0)] * 3
    groups = Groups(
        cp.asarray(np.array(padded, np.int32)), cp.asarray(np.array([len(items)], np.int32)), rows_of_item,
        cp.asarray(x_rows.astype(np.int32)), cp.asarray(y_rows.astype(np.int32)),
    )  # fmt: skip
    linear(w, device_x, y, stream, groups=groups)
    y = cp.asnumpy(y)
    wanted = np.stack([x[row] @ pairs[expert][1].T for row, expert in zip(x_rows, places, strict=True)])
    assert error(y[y_rows], wanted) < CLOSE
    assert np.isnan(np.delete(y, y_rows, axis=0)).all()
    alone = from_host([pairs[2][0]], quant, rows, k, kernels.limits)
    single = product(linear, alone, device_x[x_rows[3:4]], stream)
    assert np.array_equal(single[0], y[y_rows[3]])


def test_refuses_what_does_not_fit(kernels: Any, stream: Any) -> None:
    quant = QuantType.Q8_0
    linear = Linear(kernels, FORMATS[quant])
    w = from_host([random_matrix(quant, 32, 64)], quant, 32, 64, kernels.limits)
    x, y = cp.zeros((2, 64), cp.float16), cp.zeros((2, 32), cp.float32)
    for wrong in (x[:, :56], x.astype(cp.float32), x[:, ::2]):
        with pytest.raises(ValueError, match="x"):
            linear(w, wrong, y, stream)
    with pytest.raises(ValueError, match="y"):
        linear(w, x, y[:1], stream)
    with pytest.raises(ValueError, match="gated"):
        linear(w, x, y, stream, Epilogue.SILU_F16)
