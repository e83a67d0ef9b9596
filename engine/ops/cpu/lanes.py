"""Sixteen float32 lanes as a value of numba code, and what can be done with them.

A sum over k is always 16 partial sums, lane i taking k = i, i + 16, ..., by fused multiply-add, and then one fixed tree
(`total`). LLVM turns the 16 lanes into whatever registers the machine has; the order, hence every bit of the result, is
the same for all of them, for any number of rows and for any tile. Arrays are C-contiguous, places are element indices
from their first element, and nothing is bounds-checked: callers own the arithmetic.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
F32, I8, I32 = ir.FloatType(), ir.IntType(8), ir.IntType(32)
VECTOR = ir.VectorType(F32, LANES)
Value = Any
Builder = Any


class Lanes(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="f32x16")


LANES_TYPE = Lanes()


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, VECTOR)


def word(function: Callable[..., Any]) -> Callable[..., Any]:
    """numba's `intrinsic`: a function that is called with types and answers with a signature and a maker of LLVM IR."""
    return intrinsic(function)  # type: ignore[no-any-return]


# Building blocks in LLVM IR, also used by tile.py.


def pointer(context: Any, builder: Builder, array_type: Any, array: Value, place: Value, target: Any) -> Value:
    """Address of the element at flat `place`, as a pointer to `target`."""
    first = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(first, [place]), target.as_pointer())


def call_llvm(builder: Builder, name: str, result: Any, arguments: Sequence[Value]) -> Value:
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def fused(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """a * b + c, rounded once, of three vectors or three scalars."""
    return call_llvm(builder, "llvm.fma.v16f32" if a.type == VECTOR else "llvm.fma.f32", a.type, [a, b, c])


def pick(builder: Builder, a: Value, b: Value, lanes: Sequence[int]) -> Value:
    """The named lanes of a (0 to 15) and b (16 to 31)."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), [I32(lane) for lane in lanes])
    return builder.shuffle_vector(a, b, mask)


def spread(builder: Builder, scalar: Value) -> Value:
    single = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, I32(0))
    return pick(builder, single, single, [0] * LANES)


def totals(builder: Builder, vectors: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Reduce each of up to 16 vectors to one number: lane i of the result is that of vector i.

    The tree of each is i + (i + 8), then + 4, + 2, + 1, whoever its neighbours are: two vectors are folded into the
    halves of one, until one is left.
    """
    width = LANES
    left = list(vectors)
    while width > 1:
        half, starts = width // 2, range(0, LANES, width)
        low = [start + lane for start in starts for lane in range(half)]
        pairs = [(left[i], left[i + 1] if i + 1 < len(left) else left[i]) for i in range(0, len(left), 2)]
        both = low + [LANES + lane for lane in low]
        left = [
            combine(pick(builder, a, b, both), pick(builder, a, b, [lane + half for lane in both])) for a, b in pairs
        ]
        width = half
    return left[0]


# The words of kernels.


@word
def splat(typing_context, value):  # type: ignore[no-untyped-def]
    """All lanes = value."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return spread(builder, arguments[0])

    return LANES_TYPE(types.float32), generate


@word
def fma(typing_context, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c, rounded once."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return fused(builder, *arguments)

    return LANES_TYPE(LANES_TYPE, LANES_TYPE, LANES_TYPE), generate


def _lane_by_lane(instruction: str) -> Callable[..., Any]:
    @word
    def operation(typing_context, a, b):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
            return getattr(builder, instruction)(*arguments)

        return LANES_TYPE(LANES_TYPE, LANES_TYPE), generate

    return operation


add, subtract, multiply, divide = (_lane_by_lane(instruction) for instruction in ("fadd", "fsub", "fmul", "fdiv"))


def _greater(builder: Builder, a: Value, b: Value) -> Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@word
def larger(typing_context, a, b):  # type: ignore[no-untyped-def]
    """Lane by lane, a where a > b, else b."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return _greater(builder, *arguments)

    return LANES_TYPE(LANES_TYPE, LANES_TYPE), generate


@word
def total(typing_context, a):  # type: ignore[no-untyped-def]
    """The sum over the lanes, by the fixed tree."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return builder.extract_element(totals(builder, arguments, builder.fadd), I32(0))

    return types.float32(LANES_TYPE), generate


@word
def greatest(typing_context, a):  # type: ignore[no-untyped-def]
    """The greatest of the lanes."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return builder.extract_element(totals(builder, arguments, partial(_greater, builder)), I32(0))

    return types.float32(LANES_TYPE), generate


@word
def load(typing_context, array, place):  # type: ignore[no-untyped-def]
    """Sixteen float32 from `place` on."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        array, place = arguments
        return builder.load(pointer(context, builder, signature.args[0], array, place, VECTOR), align=4)

    return LANES_TYPE(array, types.intp), generate


def _stored(element: Any, widen: Callable[[Builder, Value], Value]) -> Callable[..., Any]:
    kind = ir.VectorType(element, LANES)

    @word
    def load_stored(typing_context, memory, byte):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
            memory, byte = arguments
            first = pointer(context, builder, signature.args[0], memory, byte, kind)
            return widen(builder, builder.load(first, align=1))

        return LANES_TYPE(memory, types.intp), generate

    return load_stored


def _code_values(builder: Builder, codes: Value) -> Value:
    return builder.sitofp(builder.sext(codes, ir.VectorType(I32, LANES)), VECTOR)


# Sixteen values from a byte of a uint8 or int8 array on, as float32.
load_floats = _stored(F32, lambda builder, floats: floats)
load_halves = _stored(ir.HalfType(), lambda builder, halves: builder.fpext(halves, VECTOR))
load_codes = _stored(I8, _code_values)


@word
def store(typing_context, array, place, lanes):  # type: ignore[no-untyped-def]
    """Write sixteen float32 from `place` on."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        array, place, lanes = arguments
        builder.store(lanes, pointer(context, builder, signature.args[0], array, place, VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, LANES_TYPE), generate


@word
def splat_at(typing_context, array, place):  # type: ignore[no-untyped-def]
    """All lanes = the float32 at `place`."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        array, place = arguments
        return spread(builder, builder.load(pointer(context, builder, signature.args[0], array, place, F32)))

    return LANES_TYPE(array, types.intp), generate


@word
def prefetch(typing_context, array, place):  # type: ignore[no-untyped-def]
    """Ask for the cache line of `place`, which may lie beyond the array's end."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        array, place = arguments
        line = pointer(context, builder, signature.args[0], array, place, I8)
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [line, I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@word
def take_ticket(typing_context, counter):  # type: ignore[no-untyped-def]
    """The next number of an int64 counter that several threads draw from."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        first = ir.Constant(ir.IntType(64), 0)
        place = pointer(context, builder, signature.args[0], arguments[0], first, ir.IntType(64))
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counter), generate


@word
def transpose(typing_context, memory, byte, step, out, place, out_step):  # type: ignore[no-untyped-def]
    """out[place + c * out_step + r] = element c of row r, for r, c < 16: row r is sixteen float32 at byte + r * step.

    memory uint8, out float32; the two regions do not overlap.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        memory, byte, step, out, place, out_step = arguments

        def address(kind: Any, array: Value, start: Value, stride: Value, i: int) -> Value:
            at = builder.add(start, builder.mul(stride, stride.type(i)))
            return pointer(context, builder, kind, array, at, VECTOR)

        rows = [builder.load(address(signature.args[0], memory, byte, step, i), align=4) for i in range(LANES)]
        width = 1
        while width < LANES:  # swap the off-diagonal squares of ever larger blocks
            low = [lane if lane & width == 0 else LANES + lane - width for lane in range(LANES)]
            high = [lane + width if lane & width == 0 else LANES + lane for lane in range(LANES)]
            for i in (i for i in range(LANES) if i & width == 0):
                a, b = rows[i], rows[i + width]
                rows[i], rows[i + width] = pick(builder, a, b, low), pick(builder, a, b, high)
            width *= 2
        for i, value in enumerate(rows):
            builder.store(value, address(signature.args[3], out, place, out_step, i), align=4)
        return context.get_dummy_value()

    return types.void(memory, types.intp, types.intp, out, types.intp, types.intp), generate
