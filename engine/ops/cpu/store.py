"""store: K and V of every row into its sequence's block, as float32, as half float, or as int8 with a scale.

int8: scale = greatest magnitude of a head's vector / 127, rounded to half precision; code = x / scale, to nearest.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from engine.config import BLOCK_TOKENS
from engine.kv_cache.storage import KvStorage
from engine.ops.backend import Heads
from engine.ops.cpu.compiled import inner, kernel
from engine.ops.cpu.lanes import word
from engine.ops.rows import Rows

GREATEST_HALF = np.float32(65504.0)
GREATEST_CODE = np.float32(127.0)


@word
def half_bits(typing_context, value):  # type: ignore[no-untyped-def]
    """The bits of a float32 rounded to half precision."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@word
def half_value(typing_context, bits):  # type: ignore[no-untyped-def]
    """The float32 of half precision bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@kernel()
def _store_f32(qkv, column, sequences, positions, tables, kv, scales):  # type: ignore[no-untyped-def]
    _, _, heads, _, dim = kv.shape
    for m in range(len(qkv)):
        block, token = tables[sequences[m], positions[m] // BLOCK_TOKENS], positions[m] % BLOCK_TOKENS
        for half in range(2):
            for h in range(heads):
                start = column + (half * heads + h) * dim
                for d in range(dim):
                    kv[half, block, h, token, d] = qkv[m, start + d]


@kernel()
def _store_f16(qkv, column, sequences, positions, tables, kv, scales):  # type: ignore[no-untyped-def]
    _, _, heads, _, dim = kv.shape
    for m in range(len(qkv)):
        block, token = tables[sequences[m], positions[m] // BLOCK_TOKENS], positions[m] % BLOCK_TOKENS
        for half in range(2):
            for h in range(heads):
                start = column + (half * heads + h) * dim
                for d in range(dim):
                    value = min(max(qkv[m, start + d], -GREATEST_HALF), GREATEST_HALF)
                    kv[half, block, h, token, d] = half_bits(value)


@inner
def _scale(qkv, m, start, dim):  # type: ignore[no-untyped-def]
    greatest = np.float32(0.0)
    for d in range(dim):
        greatest = max(greatest, abs(qkv[m, start + d]))
    return half_bits(min(greatest / GREATEST_CODE, GREATEST_HALF))


@kernel()
def _store_int8(qkv, column, sequences, positions, tables, kv, scales):  # type: ignore[no-untyped-def]
    _, _, heads, _, dim = kv.shape
    for m in range(len(qkv)):
        block, token = tables[sequences[m], positions[m] // BLOCK_TOKENS], positions[m] % BLOCK_TOKENS
        for half in range(2):
            for h in range(heads):
                start = column + (half * heads + h) * dim
                bits = _scale(qkv, m, start, dim)
                scales[half, block, h, token] = bits
                scale = half_value(bits)
                factor = np.float32(0.0) if scale == 0 else np.float32(1.0) / scale
                for d in range(dim):
                    code = np.rint(qkv[m, start + d] * factor)
                    kv[half, block, h, token, d] = np.int8(min(max(code, -GREATEST_CODE), GREATEST_CODE))


_STORES = {"f32": _store_f32, "f16": _store_f16, "int8": _store_int8}


def store(qkv: npt.NDArray[np.float32], heads: Heads, rows: Rows, kv: KvStorage, layer: int) -> None:
    """K and V of qkv float32 [rows, (heads + 2 * kv heads) * dim] into `layer` of kv."""
    assert qkv.shape == (len(rows), (heads.heads + 2 * heads.kv_heads) * heads.dim)
    column = heads.heads * heads.dim
    run = _STORES[kv.dtype]
    run(qkv, column, rows.sequences, rows.positions, rows.tables, kv.data[layer], kv.scales[layer])
