"""Attention over the paged cache: the wrapper of attention_decode.cu and attention_prefill.cu."""

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.ops.cuda.cache import Cache, CacheStruct
from engine.ops.cuda.compile import Unit
from engine.ops.cuda.launch import Array, Kernels, Pointer, address, rows_of
from engine.plan.scratch import ATTENTION_RUNS, GROUP_ROWS

DIMS = (32, 64, 128, 256)
_DECODE_WARPS, _PREFILL_ROWS, _PREFILL_WARPS = 2, 64, 4


class DecodeArgs(ctypes.Structure):
    """`DecodeArgs` of attention_decode.cu."""

    _fields_ = (
        ("cache", CacheStruct),
        ("q", Pointer),
        ("out", Pointer),
        ("parts", Pointer),
        ("sums", Pointer),
        ("positions", Pointer),
        ("sequences", Pointer),
        ("m", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("ldo", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class PrefillArgs(ctypes.Structure):
    """`PrefillArgs` of attention_prefill.cu."""

    _fields_ = (
        ("cache", CacheStruct),
        ("q", Pointer),
        ("out", Pointer),
        ("positions", Pointer),
        ("sequences", Pointer),
        ("m", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("ldo", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


def _shared_bytes(dim: int, int8: bool) -> tuple[int, int]:
    """Dynamic shared memory of decode and prefill; the kernels hold themselves to it."""
    token = 2 * max(128, dim * (1 if int8 else 2)) + (4 if int8 else 0)
    if dim > 128:  # queries do not fit the registers
        queries = dim // 32 * 1024
        return _DECODE_WARPS * (2 * 16 * token + queries), 2 * 32 * token + _PREFILL_WARPS * queries
    return _DECODE_WARPS * 3 * 32 * token, 2 * 64 * token


def units(dim: int, int8: bool) -> tuple[Unit, Unit]:
    """Compilations of decode and prefill for one head dimension and cache type."""
    decode, prefill = _shared_bytes(dim, int8)
    common = {"DIM": dim, "KV_INT8": int(int8)}
    return (
        Unit.of("attention_decode.cu", common | {"ARGS_BYTES": ctypes.sizeof(DecodeArgs), "DECODE_SHARED": decode}),
        Unit.of("attention_prefill.cu", common | {"ARGS_BYTES": ctypes.sizeof(PrefillArgs), "PREFILL_SHARED": prefill}),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Room for the parts of up to GROUP_ROWS rows, which every layer uses again."""

    parts: Array
    sums: Array

    @classmethod
    def of(cls, room: Mapping[str, Array]) -> Self:
        return cls(room["attention_parts"], room["attention_sums"])


class Attention:
    """Both kernels for one head dimension and cache type. Raises ValueError for a head dimension that has none."""

    def __init__(self, kernels: Kernels, dim: int, int8: bool) -> None:
        if dim not in DIMS:
            raise ValueError(f"head dimension {dim} has no attention kernel; there are {DIMS}")
        decode, prefill = (kernels.load(unit) for unit in units(dim, int8))
        self._decode, self._combine = decode["attention_decode"], decode["attention_combine"]
        self._prefill = prefill["attention_prefill"]
        self._shared = _shared_bytes(dim, int8)
        self._decode.allow_shared(self._shared[0])
        self._prefill.allow_shared(self._shared[1])
        self._blocks = 2 * kernels.limits.multiprocessors
        self._dim, self._scale = dim, math.log2(math.e) / math.sqrt(dim)

    def decode(
        self,
        q: Array,
        out: Array,
        cache: Cache,
        layer: int,
        positions: Array,
        sequences: Array,
        room: Parts,
        stream: Any,
    ) -> None:
        """out f16 [m, >= heads * dim] for q f16 [m, heads * dim], each row over its own sequence. m up to GROUP_ROWS.

        positions, sequences int32 [m]; the row of position -1 becomes zeros. Raises ValueError.
        """
        m, heads = int(q.shape[0]), int(q.shape[1]) // self._dim
        if m > GROUP_ROWS:
            raise ValueError(f"{m} rows: one decode launch takes {GROUP_ROWS}")
        out_at, ldo = rows_of(out, "float16", m, heads * self._dim, "out")
        room_shape = room.parts.shape[0], ATTENTION_RUNS, heads, self._dim
        if room.parts.shape[0] < m:
            raise ValueError(f"room for {room.parts.shape[0]} rows, {m} given")
        args = DecodeArgs(
            cache.struct(layer), address(q, "float16", (m, heads * self._dim), "q"), out_at,
            address(room.parts, "float32", room_shape, "parts"),
            address(room.sums, "float32", (*room_shape[:3], 2), "sums"),
            address(positions, "int32", (m,), "positions"), address(sequences, "int32", (m,), "sequences"),
            m, heads, ldo, self._scale,
        )  # fmt: skip
        self._decode.launch((self._blocks, 1, 1), _DECODE_WARPS * 32, args, stream, self._shared[0])
        self._combine.launch((m, heads, 1), self._dim, args, stream)

    def prefill(
        self, q: Array, out: Array, cache: Cache, layer: int, positions: Array, sequences: Array, stream: Any
    ) -> None:
        """As `decode`, for rows at consecutive positions of one sequence, padding last; it leaves padded rows alone."""
        m, heads = int(q.shape[0]), int(q.shape[1]) // self._dim
        out_at, ldo = rows_of(out, "float16", m, heads * self._dim, "out")
        args = PrefillArgs(
            cache.struct(layer), address(q, "float16", (m, heads * self._dim), "q"), out_at,
            address(positions, "int32", (m,), "positions"), address(sequences, "int32", (m,), "sequences"),
            m, heads, ldo, self._scale,
        )  # fmt: skip
        grid = -(-m // _PREFILL_ROWS), heads, 1
        self._prefill.launch(grid, _PREFILL_WARPS * 32, args, stream, self._shared[1])
