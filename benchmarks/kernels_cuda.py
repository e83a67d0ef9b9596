"""CUDA kernels at the shapes of real models: time, achieved bytes per second, share of the card's own copy rate.

    python -m benchmarks.kernels_cuda [--only linear,experts,attention,small] [--json FILE]

Each figure is the mean over a captured graph whose nodes go round distinct weights of at least 2 GB, so that no cache serves
them; launches are chained as in decode (programmatic dependent launch). Weights are random.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

from engine.gguf.quants import QUANTS, QuantType
from engine.messages import Sampling
from engine.ops.cuda.attention import Attention, Parts
from engine.ops.cuda.cache import Cache
from engine.ops.cuda.launch import Kernels
from engine.ops.cuda.layout import FORMATS, lay, numbers
from engine.ops.cuda.linear import Epilogue, Groups, Linear
from engine.ops.cuda.qkv import Qkv, Rotation
from engine.ops.cuda.rmsnorm import Rmsnorm
from engine.ops.cuda.route import Route, Routing
from engine.ops.cuda.sample import Drawn, Sampler
from engine.ops.cuda.silu_mul import SiluMul
from engine.ops.cuda.weight import Weight

SPAN_BYTES = 2 << 30
ROWS = (1, 8, 16, 32, 64, 128, 256)
Q4, Q6 = QuantType.Q4_K, QuantType.Q6_K
MATRICES = {
    "qwen3-8b": (("qkv", 6144, 4096, Q4, False), ("o", 4096, 4096, Q4, False), ("gate_up", 12288, 4096, Q4, True),
                 ("down", 4096, 12288, Q4, False), ("down", 4096, 12288, Q6, False), ("head", 151936, 4096, Q6, False)),
    "qwen3-30b-a3b": (("qkv", 5120, 2048, Q4, False), ("o", 2048, 4096, Q4, False), ("head", 151936, 2048, Q6, False)),
}  # fmt: skip
EXPERTS = (("gate_up", 768, 2048, Q4, True), ("down", 2048, 768, Q4, False), ("down", 2048, 768, Q6, False))


def copy_rate(stream: Any) -> float:
    """Bytes per second, read plus written, of a large device copy: the bandwidth that shares are held against."""
    a, b = cp.zeros(1 << 32, cp.uint8), cp.empty(1 << 32, cp.uint8)
    best = float("inf")
    for _ in range(5):
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record(stream)
        cp.cuda.runtime.memcpyAsync(b.data.ptr, a.data.ptr, a.nbytes, cp.cuda.runtime.memcpyDeviceToDevice, stream.ptr)
        end.record(stream)
        end.synchronize()
        best = min(best, cp.cuda.get_elapsed_time(start, end) / 1e3)
    return 2 * a.nbytes / best


def timed(stream: Any, body: Callable[[], Any], nodes: int, repeats: int = 3) -> float:
    """Seconds of one node of the graph that `body` makes on `stream`: the best of a few replays."""
    body()
    stream.synchronize()
    stream.begin_capture()
    body()
    graph = stream.end_capture()
    best, start, end = float("inf"), cp.cuda.Event(), cp.cuda.Event()
    for turn in range(repeats + 1):
        replays = 1 if turn == 0 else max(1, int(5e-3 / (best * nodes)))  # the first turn wakes the clocks and sizes the others
        for _ in range(replays if turn else 20):
            graph.launch(stream)
        start.record(stream)
        for _ in range(replays):
            graph.launch(stream)
        end.record(stream)
        end.synchronize()
        best = min(best, cp.cuda.get_elapsed_time(start, end) / 1e3 / nodes / replays)
    return best


def random_weights(kernels: Kernels, quant: QuantType, rows: int, k: int, experts: int, copies: int, gated: bool) -> list[Weight]:
    """Distinct matrices with sane scales: random codes under the scales of one small random matrix."""
    form = FORMATS[quant]
    tiles, along_k, size = form.shape(rows, k)
    spec = QUANTS[quant]
    blocks = np.random.default_rng(0).integers(0, 256, (16 * k // spec.block_elements, spec.block_bytes), dtype=np.uint8)
    for field in {"d", "dmin"} & set(spec.layout.names or ()):
        blocks.view(spec.layout)[field] = 2.0**-12
    sample = cp.asarray(lay(blocks.reshape(-1), quant, 16, k))
    found = numbers(form, 2.0**-12)
    made = []
    for _ in range(copies):
        records = cp.random.randint(0, 256, (experts, tiles * (2 if gated else 1), along_k, size), dtype=cp.uint8)
        records[..., form.scales_at :] = sample[..., form.scales_at :]
        made.append(Weight.of(records, form, found, rows, k, kernels.limits, gated=gated))
    return made


def bench_linear(kernels: Kernels, stream: Any, rate: float) -> list[dict[str, Any]]:
    lines = []
    for model, matrices in MATRICES.items():
        for name, rows, k, quant, gated in matrices:
            form = FORMATS[quant]
            size = int(np.prod(form.shape(rows, k))) * (2 if gated else 1)
            weights = random_weights(kernels, quant, rows, k, 1, min(64, max(2, SPAN_BYTES // size)), gated)
            linear = Linear(kernels, form)
            for m in ROWS:
                x = cp.random.standard_normal((m, k), dtype=cp.float32).astype(cp.float16)
                y = cp.empty((m, rows), cp.float16 if gated else cp.float32)
                epilogue = Epilogue.SILU_F16 if gated else Epilogue.STORE_F32

                def body() -> None:
                    for w in weights:
                        linear(w, x, y, stream, epilogue)

                seconds = timed(stream, body, len(weights))
                tflops = 2 * m * rows * k * (2 if gated else 1) / seconds / 1e12
                lines.append({"op": "linear", "model": model, "matrix": name, "quant": quant.name, "shape": [rows, k], "m": m,
                              "us": seconds * 1e6, "TBps": size / seconds / 1e12, "share": size / seconds / rate,
                              "TFLOPs": tflops})  # fmt: skip
            del weights
            cp.get_default_memory_pool().free_all_blocks()
    return lines


def bench_experts(kernels: Kernels, stream: Any, rate: float) -> list[dict[str, Any]]:
    """Eight of 128 experts a token; tokens choose at random, so few share one."""
    lines, rng = [], np.random.default_rng(1)
    for name, rows, k, quant, gated in EXPERTS:
        form = FORMATS[quant]
        weights = random_weights(kernels, quant, rows, k, 128, 8, gated)
        one = int(np.prod(weights[0].records.shape[1:]))
        linear = Linear(kernels, form)
        for m in (1, 8, 32, 64, 512):
            groups, touched = [], 0
            rows_of_item = 8 if m <= 64 else 64
            for _ in weights:
                chosen = np.stack([rng.permutation(128)[:8] for _ in range(m)])
                order = np.argsort(chosen.reshape(-1), kind="stable")
                counts = np.bincount(chosen.reshape(-1), minlength=128)
                starts = np.cumsum(counts) - counts
                items = [(e, starts[e] + f, min(rows_of_item, counts[e] - f), 0) for e in range(128) for f in range(0, counts[e], rows_of_item)]
                touched += int((counts > 0).sum())
                most = min(8 * m, 128 + 8 * m // rows_of_item)
                padded = np.zeros((most, 4), np.int32)
                padded[: len(items)] = items
                x_rows = (order // 8) if gated else order
                groups.append(Groups(cp.asarray(padded), cp.asarray(np.array([len(items)], np.int32)), rows_of_item, cp.asarray(x_rows.astype(np.int32)), None))
            x = cp.random.standard_normal((m if gated else 8 * m, k), dtype=cp.float32).astype(cp.float16)
            y = cp.empty((8 * m, rows), cp.float16 if gated else cp.float32)
            epilogue = Epilogue.SILU_F16 if gated else Epilogue.STORE_F32

            def body() -> None:
                for w, group in zip(weights, groups, strict=True):
                    linear(w, x, y, stream, epilogue, groups=group)

            seconds = timed(stream, body, len(weights), 6)
            size = one * touched / len(weights)
            tflops = 2 * 8 * m * rows * k * (2 if gated else 1) / seconds / 1e12
            lines.append({"op": "experts", "matrix": name, "quant": quant.name, "shape": [rows, k], "m": m, "us": seconds * 1e6,
                          "TBps": size / seconds / 1e12, "share": size / seconds / rate, "TFLOPs": tflops})  # fmt: skip
        del weights
        cp.get_default_memory_pool().free_all_blocks()
    return lines


def bench_attention(kernels: Kernels, stream: Any, rate: float) -> list[dict[str, Any]]:
    """32 heads over 8 kv heads of 128, f16 and int8; decode rows share one context length."""
    lines, heads, kv_heads, dim = [], 32, 8, 128
    for int8 in (False, True):
        attention = Attention(kernels, dim, int8)
        token_bytes = 2 * kv_heads * (dim + 2 if int8 else 2 * dim)
        for m, context in ((1, 512), (1, 4096), (1, 32768), (1, 131072), (8, 640), (32, 640), (64, 640), (64, 4096)):
            layers = max(1, min(16, SPAN_BYTES // (m * context * token_bytes)))
            cache, positions, sequences = random_cache(layers, m, context, kv_heads, dim, int8)
            room = Parts.allocate(m, heads, dim)
            q = cp.random.standard_normal((m, heads * dim), dtype=cp.float32).astype(cp.float16)
            out = cp.empty_like(q)

            def body() -> None:
                for layer in range(layers):
                    attention.decode(q, out, cache, layer, positions, sequences, room, stream)

            seconds, size = timed(stream, body, layers), m * context * token_bytes
            lines.append({"op": "decode attention", "matrix": f"context {context}", "quant": "int8" if int8 else "f16", "m": m,
                          "us": seconds * 1e6, "TBps": size / seconds / 1e12, "share": size / seconds / rate,
                          "TFLOPs": 4 * m * context * heads * dim / seconds / 1e12})  # fmt: skip
            del cache
            cp.get_default_memory_pool().free_all_blocks()
        for rows, context in ((64, 64), (512, 512), (4096, 4096), (4096, 32768)):
            cache, _, _ = random_cache(1, 1, context, kv_heads, dim, int8)
            positions = cp.arange(context - rows, context, dtype=cp.int32)
            q = cp.random.standard_normal((rows, heads * dim), dtype=cp.float32).astype(cp.float16)
            out, sequences = cp.empty_like(q), cp.zeros(rows, cp.int32)
            seconds = timed(stream, lambda: attention.prefill(q, out, cache, 0, positions, sequences, stream), 1)
            size, pairs = context * token_bytes, rows * (context - rows) + rows * (rows + 1) // 2
            lines.append({"op": "prefill attention", "matrix": f"context {context}", "quant": "int8" if int8 else "f16", "m": rows,
                          "us": seconds * 1e6, "TBps": size / seconds / 1e12, "share": size / seconds / rate,
                          "TFLOPs": 4 * pairs * heads * dim / seconds / 1e12})  # fmt: skip
    return lines


def random_cache(layers: int, m: int, context: int, kv_heads: int, dim: int, int8: bool) -> tuple[Cache, Any, Any]:
    width = -(-context // 64)
    shape = (layers, 2, m * width, kv_heads, 64, dim)
    data = cp.random.randint(0, 256, (*shape[:-1], dim * (1 if int8 else 2)), dtype=cp.uint8)
    if int8:
        data = data.view(cp.int8)
    else:
        data.view(cp.uint16)[...] &= 0xBBFF  # magnitudes under 2
        data = data.view(cp.float16)
    scales = cp.full(shape[:-1], 0.01, cp.float16) if int8 else None
    tables = cp.random.permutation(m * width).astype(cp.int32).reshape(m, width)
    return Cache(data, scales, tables), cp.full(m, context - 1, cp.int32), cp.arange(m, dtype=cp.int32)


def bench_small(kernels: Kernels, stream: Any, rate: float) -> list[dict[str, Any]]:
    """The launches between the products: latency, at the shapes of qwen3-8b and of qwen3-30b-a3b's router."""
    lines: list[dict[str, Any]] = []

    def add(op: str, m: int, size: int, seconds: float) -> None:
        lines.append({"op": op, "m": m, "us": seconds * 1e6, "TBps": size / seconds / 1e12, "share": size / seconds / rate, "TFLOPs": 0.0})

    rmsnorm, qkv, route, silu_mul = Rmsnorm(kernels), Qkv(kernels), Route(kernels), SiluMul(kernels)
    rotation = Rotation(cp.asarray(1e6 ** (-np.arange(64) / 64)), 1.0, False)
    for m in (1, 32, 512, 4096):
        x, weight, y = cp.random.standard_normal((m, 4096), dtype=cp.float32), cp.ones(4096, cp.float32), cp.empty((m, 4096), cp.float16)
        add("rmsnorm", m, m * 4096 * 6, timed(stream, lambda: [rmsnorm(x, weight, 1e-6, y, stream) for _ in range(20)], 20))
        cache, _, _ = random_cache(1, 1, max(m, 64), 8, 128, False)
        fused, positions, sequences = cp.random.standard_normal((m, 6144), dtype=cp.float32), cp.arange(m, dtype=cp.int32), cp.zeros(m, cp.int32)
        norms = cp.ones(128, cp.float32), cp.ones(128, cp.float32), 1e-6
        add("qkv", m, m * 6144 * 6, timed(stream, lambda: [qkv(fused, y, cache, 0, rotation, positions, sequences, stream, norms) for _ in range(20)], 20))
        logits, routing = cp.random.standard_normal((m, 128), dtype=cp.float32), Routing.allocate(m, 8, 128, 8 if m < 512 else 64)
        add("route", m, m * 512, timed(stream, lambda: [route(logits, positions, True, routing, stream) for _ in range(20)], 20))
        parts, out = cp.empty((m * 8, 2048), cp.float32), cp.zeros((m, 2048), cp.float32)
        add("route_add", m, m * 2048 * 40, timed(stream, lambda: [route.add(parts, out, positions, routing, stream) for _ in range(20)], 20))
        both, h = cp.random.standard_normal((m, 24576), dtype=cp.float32), cp.empty((m, 12288), cp.float16)
        add("silu_mul", m, m * 12288 * 10, timed(stream, lambda: [silu_mul(both, h, stream) for _ in range(20)], 20))
    vocab = 151936
    for name, sampling in (("greedy", Sampling(temperature=0.0)), ("plain", Sampling()), ("top_k 40, top_p 0.9", Sampling(top_k=40, top_p=0.9)),
                           ("top 20 logprobs", Sampling(temperature=0.0, logprobs=20))):  # fmt: skip
        for m in (1, 64):
            sampler, drawn = Sampler(kernels, m, m, vocab), Drawn.allocate(m)
            for slot in range(m):
                sampler.admit(slot, sampling, [], [], stream)
            logits = cp.random.standard_normal((m, vocab), dtype=cp.float32) * 3
            rows, indices = cp.arange(m, dtype=cp.int32), cp.zeros(m, cp.int32)
            add(f"sample {name}", m, m * vocab * 4, timed(stream, lambda: [sampler(logits, rows, indices, drawn, stream) for _ in range(10)], 10))
    return lines


BENCHES = {"linear": bench_linear, "experts": bench_experts, "attention": bench_attention, "small": bench_small}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(BENCHES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cache = os.environ.get("ULLAGE_CACHE_DIR")
    kernels = Kernels(0, Path(cache) / "kernels" if cache else None)
    stream = cp.cuda.Stream(non_blocking=True)
    device = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    with stream:
        rate = copy_rate(stream)
        lines = [line for name in options.only.split(",") for line in BENCHES[name](kernels, stream, rate)]
    out = sys.stdout
    out.write(f"{device}, device copy {rate / 1e12:.2f} TB/s\n")
    for line in lines:
        head = " ".join(str(line.get(key, "")) for key in ("op", "model", "matrix", "quant", "shape"))
        out.write(f"{head:55} m={line['m']:<4} {line['us']:8.1f} us {line['TBps']:6.2f} TB/s {line['share']:5.0%} {line['TFLOPs']:6.1f} TF\n")
    if options.json:
        options.json.write_text(json.dumps({"device": device, "copy_bytes_per_second": rate, "lines": lines}) + "\n")


if __name__ == "__main__":
    main()
