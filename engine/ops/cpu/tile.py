"""The two register tiles that all products are made of: dot_tile sums over k, mix_tile over tokens.

A tile of any size computes each of its results by the same operations in the same order as a tile of one (lanes.py),
so sizes are chosen for speed alone: with 4 × 4, sixteen of 32 vector registers hold sums, eight loads feed sixteen
multiply-adds, and the sixteen sums leave through one transposed reduction.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.ops.cpu.lanes import F32, LANES, VECTOR, Builder, Value, fused, pick, pointer, spread, totals, word

TILE = 4
"""Rows and columns of the large tiles."""

ZERO = ir.Constant(VECTOR, [F32(0.0)] * LANES)


def _rows(builder: Builder, first: Value, place: Value, stride: Value, count: int) -> list[Value]:
    """Addresses of `count` rows that lie `stride` elements apart, the first at element `place`."""
    return [builder.gep(first, [builder.add(place, builder.mul(stride, stride.type(i)))]) for i in range(count)]


def _vector(builder: Builder, row: Value, place: Value) -> Value:
    return builder.load(builder.bitcast(builder.gep(row, [place]), VECTOR.as_pointer()), align=4)


def _sums(builder: Builder, values: Sequence[Value]) -> list[Value]:
    """Variables that live in registers: LLVM promotes them."""
    slots = [cgutils.alloca_once(builder, VECTOR) for _ in values]
    for slot, value in zip(slots, values, strict=True):
        builder.store(value, slot)
    return slots


def _add(builder: Builder, a: Value, b: Value, slot: Value) -> None:
    builder.store(fused(builder, a, b, builder.load(slot)), slot)


def dot_tile(rows: int, cols: int) -> Callable[..., None]:
    """out[o + r * out_step + c] += sum over k of x[a + r * x_step + k] * w[b + c * w_step + k].

    For r < rows, c < cols (at most 16 together) and k a multiple of 16; all arrays float32.
    """

    @word
    def tile(typing_context, x, a, x_step, w, b, w_step, k, out, o, out_step):  # type: ignore[no-untyped-def]
        place = types.intp

        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
            _, a, x_step, _, b, w_step, k, _, o, out_step = arguments
            first = [pointer(context, builder, signature.args[i], arguments[i], k.type(0), F32) for i in (0, 3, 7)]
            x_rows, w_rows = _rows(builder, first[0], a, x_step, rows), _rows(builder, first[1], b, w_step, cols)
            sums = _sums(builder, [ZERO] * (rows * cols))
            with cgutils.for_range_slice(builder, k.type(0), k, k.type(LANES), k.type) as (at, _):
                columns = [_vector(builder, row, at) for row in w_rows]
                for r, row in enumerate(x_rows):
                    values = _vector(builder, row, at)
                    for c, column in enumerate(columns):
                        _add(builder, values, column, sums[r * cols + c])
            result = totals(builder, [builder.load(slot) for slot in sums], builder.fadd)
            for r, row in enumerate(_rows(builder, first[2], o, out_step, rows)):
                part = pick(builder, result, result, range(r * cols, (r + 1) * cols))
                address = builder.bitcast(row, part.type.as_pointer())
                builder.store(builder.fadd(builder.load(address, align=4), part), address, align=4)
            return context.get_dummy_value()

        return types.void(x, place, place, w, place, place, place, out, place, place), generate

    return tile


def mix_tile(rows: int, vectors: int) -> Callable[..., None]:
    """out[o + r * out_step + d] += sum over t < count of p[a + r * p_step + t] * v[b + t * v_step + d].

    For r < rows and d < 16 * vectors; t ascends, one multiply-add each. All arrays float32.
    """

    @word
    def tile(typing_context, p, a, p_step, v, b, v_step, count, out, o, out_step):  # type: ignore[no-untyped-def]
        place = types.intp

        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
            _, a, p_step, _, b, v_step, count, _, o, out_step = arguments
            kind = count.type
            first = [pointer(context, builder, signature.args[i], arguments[i], kind(0), F32) for i in (0, 3, 7)]
            p_rows, out_rows = _rows(builder, first[0], a, p_step, rows), _rows(builder, first[2], o, out_step, rows)
            starts = [kind(LANES * i) for i in range(vectors)]
            sums = _sums(builder, [_vector(builder, row, start) for row in out_rows for start in starts])
            with cgutils.for_range(builder, count, intp=kind) as loop:
                token = builder.gep(first[1], [builder.add(b, builder.mul(loop.index, v_step))])
                values = [_vector(builder, token, start) for start in starts]
                for r, row in enumerate(p_rows):
                    share = spread(builder, builder.load(builder.gep(row, [loop.index])))
                    for i, value in enumerate(values):
                        _add(builder, share, value, sums[r * vectors + i])
            for r, row in enumerate(out_rows):
                for i, start in enumerate(starts):
                    address = builder.bitcast(builder.gep(row, [start]), VECTOR.as_pointer())
                    builder.store(builder.load(sums[r * vectors + i]), address, align=4)
            return context.get_dummy_value()

        return types.void(p, place, place, v, place, place, place, out, place, place), generate

    return tile
