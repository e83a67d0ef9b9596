"""e to the x, for one float32 and for sixteen: the same operations, hence the same bits."""

from typing import Any

from llvmlite import ir
from numba import types

from engine.ops.cpu.lanes import F32, I32, LANES, LANES_TYPE, VECTOR, Builder, Value, call_llvm, fused, word

LEAST, GREATEST = -87.0, 88.0
"""Below the first the result is 0, above the second it stays at 1.7e38: neither a denormal nor infinity comes out."""
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
SERIES = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)


def _generate(builder: Builder, x: Value) -> Value:
    """x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series to r^7 (rest below 1e-8), times 2^n by its bits."""
    whole = ir.VectorType(I32, LANES) if x.type == VECTOR else I32

    def constant(kind: Any, value: float) -> Value:
        return ir.Constant(kind, [value] * LANES) if x.type == VECTOR else ir.Constant(kind, value)

    def real(value: float) -> Value:
        return constant(x.type, F32(value) if x.type == VECTOR else value)

    def integer(value: int) -> Value:
        return constant(whole, I32(value) if x.type == VECTOR else value)

    low = builder.select(builder.fcmp_ordered(">", x, real(LEAST)), x, real(LEAST))
    clipped = builder.select(builder.fcmp_ordered("<", low, real(GREATEST)), low, real(GREATEST))
    floor = "llvm.floor.v16f32" if x.type == VECTOR else "llvm.floor.f32"
    n = call_llvm(builder, floor, x.type, [fused(builder, clipped, real(LOG2_E), real(0.5))])
    r = fused(builder, n, real(-LN2_HIGH), clipped)
    r = fused(builder, n, real(-LN2_LOW), r)
    result = real(SERIES[0])
    for coefficient in SERIES[1:]:
        result = fused(builder, result, r, real(coefficient))
    bits = builder.shl(builder.add(builder.fptosi(n, whole), integer(127)), integer(23))
    result = builder.fmul(result, builder.bitcast(bits, x.type))
    return builder.select(builder.fcmp_ordered("<", x, real(LEAST)), real(0.0), result)


@word
def exponential(typing_context, x):  # type: ignore[no-untyped-def]
    """e ** x of a float32, within 2 units of the last place."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return _generate(builder, arguments[0])

    return types.float32(types.float32), generate


@word
def exponentials(typing_context, x):  # type: ignore[no-untyped-def]
    """e ** x of sixteen."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return _generate(builder, arguments[0])

    return LANES_TYPE(LANES_TYPE), generate
