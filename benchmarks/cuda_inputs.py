"""Shapes of real models, and random device inputs of them, for kernels_cuda.py."""

from typing import Any

import cupy as cp
import numpy as np

from engine.gguf.quants import QUANTS, QuantType
from engine.ops.cuda.cache import Cache
from engine.ops.cuda.layout import FORMATS, lay, numbers
from engine.ops.cuda.linear import Groups
from engine.ops.cuda.split import Limits
from engine.ops.cuda.weight import Weight

Q4, Q6 = QuantType.Q4_K, QuantType.Q6_K
MATRICES = (
    ("qwen3-8b", "qkv", 6144, 4096, Q4, False),
    ("qwen3-8b", "o", 4096, 4096, Q4, False),
    ("qwen3-8b", "gate_up", 12288, 4096, Q4, True),
    ("qwen3-8b", "down", 4096, 12288, Q4, False),
    ("qwen3-8b", "down", 4096, 12288, Q6, False),
    ("qwen3-8b", "head", 151936, 4096, Q6, False),
    ("qwen3-30b-a3b", "qkv", 5120, 2048, Q4, False),
    ("qwen3-30b-a3b", "o", 2048, 4096, Q4, False),
    ("qwen3-30b-a3b", "head", 151936, 2048, Q6, False),
)
"""(model, matrix, rows, k, type, gate and up in one)"""
EXPERTS = (("gate_up", 768, 2048, Q4, True), ("down", 2048, 768, Q4, False), ("down", 2048, 768, Q6, False))
HEADS = 32, 8, 128
"""Heads, kv heads and head dimension of qwen3-8b."""

_D = 2.0**-12


def random_halves(m: int, k: int) -> Any:
    return cp.random.standard_normal((m, k), dtype=cp.float32).astype(cp.float16)


def random_weights(
    limits: Limits, quant: QuantType, rows: int, k: int, *, gated: bool, span: int, experts: int = 1
) -> list[Weight]:
    """Distinct matrices of at least `span` bytes together (2 to 64): random codes under the scales of a small one."""
    form, spec = FORMATS[quant], QUANTS[quant]
    tiles, along_k, size = form.shape(rows, k)
    raw = np.random.default_rng(0).integers(0, 256, (16 * k // spec.block_elements, spec.block_bytes), dtype=np.uint8)
    for field in {"d", "dmin"} & set(spec.layout.names or ()):
        raw.view(spec.layout)[field] = _D
    sample = cp.asarray(lay(raw.reshape(-1), quant, 16, k))
    shape = experts, tiles * (2 if gated else 1), along_k, size
    made = []
    for _ in range(min(64, max(2, span // int(np.prod(shape))))):
        records = cp.random.randint(0, 256, shape, dtype=cp.uint8)
        records[..., form.scales_at :] = sample[..., form.scales_at :]
        made.append(Weight.of(records, form, numbers(form, _D), rows, k, limits, gated=gated))
    return made


def random_groups(m: int, used: int, experts: int, rows_of_item: int, *, into: bool, seed: int) -> tuple[Groups, int]:
    """What route.cu makes of `m` tokens that choose at random, and the number of experts touched."""
    rng = np.random.default_rng([seed, m])
    chosen = np.concatenate([rng.permutation(experts)[:used] for _ in range(m)])
    order, counts = np.argsort(chosen, kind="stable"), np.bincount(chosen, minlength=experts)
    starts = np.cumsum(counts) - counts
    items = [
        (expert, starts[expert] + first, min(rows_of_item, counts[expert] - first), 0)
        for expert in range(experts)
        for first in range(0, counts[expert], rows_of_item)
    ]
    padded = np.zeros((min(m * used, experts + m * used // rows_of_item), 4), np.int32)
    padded[: len(items)] = items
    places = (order // used if into else order).astype(np.int32)
    count = cp.asarray(np.array([len(items)], np.int32))
    rows = (cp.asarray(places), None) if into else (None, cp.asarray(places))
    return Groups(cp.asarray(padded), count, rows_of_item, *rows), int((counts > 0).sum())


def random_cache(layers: int, sequences: int, context: int, int8: bool) -> tuple[Cache, Any]:
    """A cache of shuffled blocks for sequences of one length, and int32 [sequences], one row of each."""
    _, kv_heads, dim = HEADS
    width = -(-context // 64)
    shape = layers, 2, sequences * width, kv_heads, 64, dim
    raw = cp.random.randint(0, 256, (*shape[:-1], dim * (1 if int8 else 2)), dtype=cp.uint8)
    if int8:
        data, scales = raw.view(cp.int8), cp.full(shape[:-1], 0.01, cp.float16)
    else:
        raw.view(cp.uint16)[...] &= 0xBBFF  # magnitudes below 2
        data, scales = raw.view(cp.float16), None
    tables = cp.random.permutation(sequences * width).astype(cp.int32).reshape(sequences, width)
    return Cache(data, scales, tables), cp.arange(sequences, dtype=cp.int32)
