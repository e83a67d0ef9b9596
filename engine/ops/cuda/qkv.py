"""Head norm, rotary embedding and the store into the cache, in one launch: the wrapper of qkv.cu."""

import ctypes
from dataclasses import dataclass
from typing import Any

from engine.ops.cuda.cache import Cache, CacheStruct
from engine.ops.cuda.compile import Unit
from engine.ops.cuda.launch import Array, Kernels, Pointer, address, optional


class QkvArgs(ctypes.Structure):
    """`QkvArgs` of qkv.cu."""

    _fields_ = (
        ("cache", CacheStruct),
        ("qkv", Pointer),
        ("q", Pointer),
        ("q_norm", Pointer),
        ("k_norm", Pointer),
        ("frequencies", Pointer),
        ("positions", Pointer),
        ("sequences", Pointer),
        ("heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("int8", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("magnitude", ctypes.c_float),
    )


UNIT = Unit.of("qkv.cu", {"ARGS_BYTES": ctypes.sizeof(QkvArgs)})
_WARPS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """engine.ops.backend.Rope on the device: `frequencies` float64 [pairs], radians a position."""

    frequencies: Array
    magnitude: float
    interleaved: bool


class Qkv:
    def __init__(self, kernels: Kernels) -> None:
        self._kernel = kernels.load(UNIT)["qkv"]

    def __call__(
        self,
        qkv: Array,
        q: Array,
        cache: Cache,
        layer: int,
        rotation: Rotation,
        positions: Array,
        sequences: Array,
        stream: Any,
        norms: tuple[Array, Array, float] | None = None,
    ) -> None:
        """q f16 [m, heads * dim] and the cache's places of `positions` from qkv f32 [m, (heads + 2 kv heads) * dim].

        positions, sequences int32 [m]; a row at position -1 is left out. `norms`: weights f32 [dim] of Q and K, eps.
        Raises ValueError.
        """
        dim, pairs = cache.dim, int(rotation.frequencies.shape[0])
        m, heads = int(q.shape[0]), int(q.shape[1]) // dim
        all_heads = heads + 2 * cache.kv_heads
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        args = QkvArgs(
            cache.struct(layer),
            address(qkv, "float32", (m, all_heads * dim), "qkv"),
            address(q, "float16", (m, heads * dim), "q"),
            optional(q_norm, "float32", (dim,), "q_norm"),
            optional(k_norm, "float32", (dim,), "k_norm"),
            address(rotation.frequencies, "float64", (None,), "frequencies"),
            address(positions, "int32", (m,), "positions"),
            address(sequences, "int32", (m,), "sequences"),
            heads, dim, pairs, rotation.interleaved, cache.int8, eps, rotation.magnitude,
        )  # fmt: skip
        self._kernel.launch((m, -(-all_heads // _WARPS), 1), _WARPS * 32, args, stream)
