"""The ops of the CUDA kernels over the fixed buffers of one stage: every call is launches, nothing is allocated."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cupy as cp

from engine.ops.backend import HeadNorm, Heads, Rope
from engine.ops.cuda.attention import Attention, Parts
from engine.ops.cuda.cache import Cache
from engine.ops.cuda.embed import Embed
from engine.ops.cuda.launch import Array, Kernels
from engine.ops.cuda.layout import TILE_ROWS, Format
from engine.ops.cuda.linear import Epilogue, Groups, Linear
from engine.ops.cuda.matrix import Matrix
from engine.ops.cuda.qkv import Qkv, Rotation
from engine.ops.cuda.rmsnorm import Rmsnorm
from engine.ops.cuda.room import Room
from engine.ops.cuda.route import Route, Routing
from engine.ops.cuda.silu_mul import SiluMul
from engine.plan.scratch import GROUP_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """Rows of one forward, int32 [m] on the device: position -1 is padding, `slots` are rows of the block tables.

    `one_sequence`: the positions are consecutive ones of one slot, padding last; otherwise each row is of its own.
    """

    tokens: Array
    positions: Array
    slots: Array
    one_sequence: bool


class CudaStep(NamedTuple):
    rows: DeviceRows
    rotation: Rotation


class Taken(NamedTuple):
    """Rows of `x` that nobody has gathered yet: the norm that follows reads them where they are."""

    x: Array
    places: Array


class CudaOps:
    """engine.ops.backend.Ops on one stage; `first_layer` is the model's number of the cache's layer 0."""

    def __init__(self, kernels: Kernels, stream: Any, room: Room, cache: Cache, first_layer: int) -> None:
        self._kernels, self._stream, self._room = kernels, stream, room
        self._cache, self._first_layer = cache, first_layer
        self._rmsnorm, self._qkv = Rmsnorm(kernels), Qkv(kernels)
        self._route, self._silu_mul = Route(kernels), SiluMul(kernels)
        self._attention = Attention(kernels, cache.dim, cache.int8)
        self._parts = Parts.of(room)
        self._linears: dict[Format, Linear] = {}
        self._embeds: dict[Format, Embed] = {}
        self._rotations: dict[int, Rotation] = {}
        self._positions: Array = None

    def begin(self, rows: DeviceRows, rope: Rope) -> CudaStep:
        self._positions = rows.positions
        if id(rope) not in self._rotations:
            self._rotations[id(rope)] = Rotation(cp.asarray(rope.frequencies), rope.magnitude, rope.interleaved)
        return CudaStep(rows, self._rotations[id(rope)])

    def embed(self, table: Matrix, step: CudaStep) -> Array:
        [part] = table.parts
        x = self._room["x"][: len(step.rows.tokens)]
        self._embed(part.weight.form)(part.weight, step.rows.tokens, x, self._stream)
        return x

    def rmsnorm(self, x: Array | Taken, weight: Array, eps: float) -> Array:
        """f16, with the padding that products want."""
        if isinstance(x, Taken):
            out = self._room["sampled"][: len(x.places)]
            self._rmsnorm(x.x, weight, eps, out, self._stream, rows=x.places)
            return out
        out = self._room["h"][: len(x)]
        self._rmsnorm(x, weight, eps, out, self._stream)
        return out

    def linear(self, x: Array, matrix: Matrix, onto: Array | None = None) -> Array:
        if onto is None:
            return self.product(x, matrix, self._room.flat("product", len(x), matrix.rows))
        return self.product(x, matrix, onto, Epilogue.ADD_F32)

    def product(
        self,
        x: Array,
        matrix: Matrix,
        out: Array,
        epilogue: Epilogue = Epilogue.STORE_F32,
        groups: Groups | None = None,
    ) -> Array:
        """`linear` into an array of the caller's, float32 [rows, matrix rows]."""
        for part in matrix.parts:
            place = out[:, part.first : part.first + part.weight.rows]
            linear = self._linear(part.weight.form)
            linear(part.weight, x, place, self._stream, epilogue, bias=part.bias, groups=groups)
        return out

    def qkv(self, qkv: Array, heads: Heads, norm: HeadNorm | None, layer: int, step: CudaStep) -> Array:
        q, rows = self._room["q"][: len(qkv)], step.rows
        place = self._cache, layer - self._first_layer
        self._qkv(qkv, q, *place, step.rotation, rows.positions, rows.slots, self._stream, norm)
        return q

    def attention(self, q: Array, heads: Heads, layer: int, step: CudaStep) -> Array:
        out, rows, layer = self._room["mixed"][: len(q)], step.rows, layer - self._first_layer
        if rows.one_sequence:
            self._attention.prefill(q, out, self._cache, layer, rows.positions, rows.slots, self._stream)
        else:
            assert len(q) <= GROUP_ROWS
            places = rows.positions, rows.slots
            self._attention.decode(q, out, self._cache, layer, *places, self._parts, self._stream)
        return out

    def swiglu(self, x: Array, gate_up: Matrix) -> Array:
        out = self._room["inner"][: len(x)]
        self._swiglu(x, gate_up, out, None)
        return out

    def route(self, logits: Array, used: int, normalise: bool) -> tuple[Routing, Array]:
        """The routing stands for the chosen experts: it holds more than their numbers."""
        routing = Routing.of(self._room, len(logits), used, int(logits.shape[1]))
        self._route(logits, self._positions, normalise, routing, self._stream)
        return routing, routing.shares

    def experts(self, x: Array, chosen: Routing, shares: Array, gate_up: Matrix, down: Matrix, onto: Array) -> Array:
        pairs = len(chosen.pairs)
        inner, parts = self._room["inner"][:pairs], self._room["parts"][:pairs]
        self._swiglu(x, gate_up, inner, chosen.into)
        self.product(inner, down, parts, groups=chosen.out)
        self._route.add(parts, onto, self._positions, chosen, self._stream)
        return onto

    def take(self, x: Array, places: Array) -> Taken:
        return Taken(x, places)

    def _swiglu(self, x: Array, gate_up: Matrix, out: Array, groups: Groups | None) -> None:
        first = gate_up.parts[0].weight
        if first.gated:
            self._linear(first.form)(first, x, out, self._stream, Epilogue.SILU_F16, groups=groups)
            return
        # Gate and up are of different types: as many of their columns at a time as there is room for.
        width, room = first.rows, self._room["product"].size // (2 * len(out))
        turn = min(width, room // TILE_ROWS * TILE_ROWS)
        for start in range(0, width, turn):
            columns = min(turn, width - start)
            product = self._room.flat("product", len(out), 2 * columns)
            for i, part in enumerate(gate_up.parts):
                rows, place = part.weight.part(start, columns), product[:, i * columns : (i + 1) * columns]
                self._linear(rows.form)(rows, x, place, self._stream, groups=groups)
            self._silu_mul(product, out[:, start : start + columns], self._stream)

    def _linear(self, form: Format) -> Linear:
        if form not in self._linears:
            self._linears[form] = Linear(self._kernels, form)
        return self._linears[form]

    def _embed(self, form: Format) -> Embed:
        if form not in self._embeds:
            self._embeds[form] = Embed(self._kernels, form)
        return self._embeds[form]
