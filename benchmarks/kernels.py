"""Every op of the CPU backend at the demo model's shapes: time, bytes and multiply-adds a second.

A row of weights is new to the cache each time, as in a forward, where 165 MB go by between two uses; activations are
not. The best of many repeats counts, for others may use the machine.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from engine.kv_cache.storage import KvDtype, allocate_kv
from engine.ops.backend import HeadNorm, Heads, Rope
from engine.ops.cpu.backend import CpuOps, CpuStep
from engine.ops.cpu.compiled import start_threads
from engine.ops.cpu.linear import Matrix
from engine.ops.cpu.memory import aligned_empty
from engine.ops.cpu.silu_mul import silu_mul
from engine.ops.rows import Rows, Span

HEADS, HIDDEN, FFN, VOCAB = Heads(9, 3, 64), 576, 1536, 49152
QKV = (HEADS.heads + 2 * HEADS.kv_heads) * HEADS.dim
DECODE_CONTEXT = 512
SECONDS = 0.4
COPY_BYTES = 256 << 20


class Row(NamedTuple):
    """`bytes` and `products` (multiply-adds) of one call."""

    op: str
    shape: str
    call: Callable[[], Any]
    bytes: int
    products: int = 0


def best_seconds(call: Callable[[], Any]) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def random(*shape: int) -> Any:
    array = aligned_empty(shape)
    array[:] = np.random.default_rng(0).normal(size=shape)
    return array


def quantised(experts: int, rows: int, cols: int) -> Matrix:
    codes = aligned_empty((experts, rows, cols), np.int8)
    codes[:] = np.random.default_rng(0).integers(0, 16, codes.shape)
    return Matrix.quantised(codes, random(experts, rows, cols // 32), random(experts, rows, cols // 32), 32)


def matrix_bytes(matrix: Matrix) -> int:
    arrays = (matrix.codes, matrix.scales, matrix.offsets, matrix.values)
    return sum(array.nbytes for array in arrays if array is not None)


def linear_rows(ops: CpuOps) -> list[Row]:
    rows = []
    for name, out, cols in (("qkv", QKV, HIDDEN), ("gate_up", 2 * FFN, HIDDEN), ("down", HIDDEN, FFN)):
        # Enough copies that none is still in the cache when its turn comes again.
        copies = [quantised(1, out, cols) for _ in range(64)]
        for batch in (1, 8, 32, 256):
            x, turn = random(batch, cols), iter(range(1 << 60))

            def call(x: Any = x, turn: Any = turn, copies: list[Matrix] = copies) -> None:
                ops.linear(x, copies[next(turn) % len(copies)])

            rows.append(
                Row("linear", f"{name} {out}x{cols}, {batch} rows", call, matrix_bytes(copies[0]), batch * out * cols)
            )
    plain, x = Matrix.plain(random(1, HIDDEN, HIDDEN)), random(256, HIDDEN)
    rows.append(
        Row("linear", "f32 576x576, 256 rows", lambda: ops.linear(x, plain), matrix_bytes(plain), 256 * HIDDEN * HIDDEN)
    )
    return rows


def attention_rows(ops: CpuOps, decode: CpuStep, prefill: CpuStep) -> list[Row]:
    dtype, rows = ops.kv.dtype, []
    token_bytes = 2 * HEADS.kv_heads * HEADS.dim * ops.kv.data.itemsize
    for name, step in (("decode, 1 row", decode), ("prefill, 256 rows", prefill)):
        qkv, positions = random(len(step.rows), QKV), step.rows.positions
        ops.qkv(qkv, HEADS, None, 0, step)
        pairs = int((positions + 1).sum())

        def call(qkv: Any = qkv, step: CpuStep = step) -> None:
            ops.attention(qkv, HEADS, 0, step)

        shape = f"{dtype} {name} at {int(positions.max()) + 1}"
        products = 2 * pairs * HEADS.heads * HEADS.dim
        rows.append(Row("attention", shape, call, int(positions.max() + 1) * token_bytes, products))
    return rows


def small_rows(ops: CpuOps, step: CpuStep) -> list[Row]:
    """The ops whose cost is their bytes, over 256 rows."""
    count = len(step.rows)
    x, weight, qkv, gate_up = random(count, HIDDEN), random(HIDDEN), random(count, QKV), random(count, 2 * FFN)
    table, logits = quantised(1, VOCAB // 8, HIDDEN), random(count, 128)
    head = np.ones(HEADS.dim, np.float32)  # any other weight, applied in place again and again, ends in denormals
    norm, inner = HeadNorm(head, head, 1e-5), random(count, FFN)
    return [
        Row("embed", "576", lambda: ops.embed(table, step), count * HIDDEN * 5),
        Row("rmsnorm", "576", lambda: ops.rmsnorm(x, weight, 1e-5), 2 * x.nbytes),
        Row("qkv", f"{ops.kv.dtype} 15 heads of 64", lambda: ops.qkv(qkv, HEADS, norm, 0, step), 5 * qkv.nbytes),
        Row("silu_mul", "1536", lambda: silu_mul(gate_up, inner, ops.threads), gate_up.nbytes * 3 // 2),
        Row("route", "8 of 128", lambda: ops.route(logits, 8, True), logits.nbytes),
    ]


def expert_rows(ops: CpuOps) -> list[Row]:
    gate_up, down = quantised(32, 256, HIDDEN), quantised(32, HIDDEN, 128)
    rows = []
    for batch in (1, 32):
        x = random(batch, HIDDEN)
        chosen, shares = ops.route(random(batch, 32), 4, True)
        used = len(np.unique(chosen))

        def call(x: Any = x, chosen: Any = chosen, shares: Any = shares) -> None:
            ops.experts(x, chosen, shares, gate_up, down, x)

        size = used * (matrix_bytes(gate_up) + matrix_bytes(down)) // 32
        rows.append(Row("experts", f"4 of 32, {batch} rows", call, size, batch * 4 * 3 * 128 * HIDDEN))
    return rows


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of one core's copy."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    return 2 * COPY_BYTES / best_seconds(lambda: np.copyto(target, source))


def run() -> dict[str, Any]:
    threads, copy = start_threads(), copy_bandwidth()
    rows: list[Row] = []
    for dtype in ("f32", "f16", "int8"):
        ops, decode, prefill = backend(dtype, threads)
        if dtype == "f32":
            rows += [*linear_rows(ops), *expert_rows(ops), *small_rows(ops, prefill)]
        rows += attention_rows(ops, decode, prefill)
    sys.stdout.write(f"{threads} threads; one core copies {copy / 1e9:.1f} GB/s\n")
    sys.stdout.write(f"{'op':10} {'shape':36} {'µs':>9} {'GB/s':>7} {'of copy':>8} {'GFLOP/s':>8}\n")
    results = []
    for row in rows:
        seconds = best_seconds(row.call)
        rate, flops = row.bytes / seconds, 2 * row.products / seconds
        sys.stdout.write(
            f"{row.op:10} {row.shape:36} {seconds * 1e6:9.1f} {rate / 1e9:7.1f} {rate / copy:8.0%} {flops / 1e9:8.1f}\n"
        )
        results.append({"op": row.op, "shape": row.shape, "us": round(seconds * 1e6, 2), "gb_s": round(rate / 1e9, 2)})
    return {"threads": threads, "copy_gb_s": round(copy / 1e9, 2), "rows": results}


def backend(dtype: KvDtype, threads: int) -> tuple[CpuOps, CpuStep, CpuStep]:
    """Ops over one layer's storage, with the step of one decode row and that of a prefill."""
    blocks = range(DECODE_CONTEXT // 64)
    ops = CpuOps(allocate_kv(dtype, 1, len(blocks), HEADS.kv_heads, HEADS.dim), HEADS, FFN, threads)
    ops.kv.data[:] = 1
    turn = Rope(1e4 ** (-np.arange(32) / 32), 1.0, True)
    decode = ops.begin(Rows.of([Span([0], DECODE_CONTEXT - 1, blocks)]), turn)
    return ops, decode, ops.begin(Rows.of([Span([0] * 256, DECODE_CONTEXT - 256, blocks)]), turn)
