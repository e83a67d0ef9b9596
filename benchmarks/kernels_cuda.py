"""CUDA kernels at the shapes of real models: time, achieved bytes per second, share of the card's own copy rate.

    python -m benchmarks.kernels_cuda [--only linear,experts,attention,small] [--json FILE]

Each figure is the best mean over a captured graph whose nodes go round distinct weights of at least 2 GB, so that no
cache serves them; launches are chained as in decode (programmatic dependent launch). Numbers are random.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

from benchmarks.cuda_inputs import EXPERTS, HEADS, MATRICES, random_cache, random_groups, random_halves, random_weights
from engine.messages import Sampling
from engine.ops.cuda.attention import Attention, Parts
from engine.ops.cuda.launch import Kernels
from engine.ops.cuda.layout import FORMATS
from engine.ops.cuda.linear import Epilogue, Linear
from engine.ops.cuda.qkv import Qkv, Rotation
from engine.ops.cuda.rmsnorm import Rmsnorm
from engine.ops.cuda.room import Room
from engine.ops.cuda.route import Route, Routing
from engine.ops.cuda.sample import Sampler
from engine.ops.cuda.silu_mul import SiluMul
from engine.plan.scratch import ITEM_COUNT, attention_buffers, route_buffers, sampler_buffers

Call = Callable[[], None]
Line = dict[str, Any]

SPAN_BYTES = 2 << 30
ROWS = (1, 8, 16, 32, 64, 128, 256)
DECODE = ((1, 512), (1, 4096), (1, 32768), (1, 131072), (8, 640), (32, 640), (64, 640), (64, 4096))
PREFILL = ((64, 64), (512, 512), (4096, 4096), (4096, 32768))
SAMPLERS = {
    "greedy": Sampling(temperature=0.0),
    "plain": Sampling(),
    "top_k 40, top_p 0.9": Sampling(top_k=40, top_p=0.9),
    "top 20 logprobs": Sampling(temperature=0.0, logprobs=20),
}


def copy_rate(stream: Any) -> float:
    """Bytes per second, read plus written, of a large device copy: the bandwidth that shares are held against."""
    a, b = cp.zeros(1 << 32, cp.uint8), cp.empty(1 << 32, cp.uint8)
    kind = cp.cuda.runtime.memcpyDeviceToDevice
    copy = partial(cp.cuda.runtime.memcpyAsync, b.data.ptr, a.data.ptr, a.nbytes, kind, stream.ptr)
    return 2 * int(a.nbytes) / min(_elapsed(stream, copy) for _ in range(5))


def timed(stream: Any, calls: Sequence[Call], repeats: int = 3) -> float:
    """Seconds of one of `calls`, captured together in one graph: the best of a few runs of at least 5 ms."""
    _all(calls)  # loads what is loaded lazily
    stream.synchronize()
    stream.begin_capture()
    _all(calls)
    graph = stream.end_capture()
    for _ in range(20):  # wakes the clocks
        graph.launch(stream)
    replays = max(1, int(5e-3 / _elapsed(stream, partial(graph.launch, stream))))
    run = partial(_all, [partial(graph.launch, stream)] * replays)
    return min(_elapsed(stream, run) for _ in range(repeats)) / replays / len(calls)


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _elapsed(stream: Any, call: Call) -> float:
    start, end = cp.cuda.Event(), cp.cuda.Event()
    start.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return float(cp.cuda.get_elapsed_time(start, end)) / 1e3


def bench_linear(kernels: Kernels, stream: Any) -> Iterator[Line]:
    for model, name, rows, k, quant, gated in MATRICES:
        linear = Linear(kernels, FORMATS[quant])
        weights = random_weights(kernels.limits, quant, rows, k, gated=gated, span=SPAN_BYTES)
        size, flops = int(weights[0].records.nbytes), 2 * rows * k * (2 if gated else 1)
        epilogue = Epilogue.SILU_F16 if gated else Epilogue.STORE_F32
        for m in ROWS:
            x, y = random_halves(m, k), cp.empty((m, rows), cp.float16 if gated else cp.float32)
            seconds = timed(stream, [partial(linear, w, x, y, stream, epilogue) for w in weights])
            yield line("linear", f"{model} {name} {quant.name} {rows}x{k}", m, seconds, size, m * flops)
        del weights
        cp.get_default_memory_pool().free_all_blocks()


def bench_experts(kernels: Kernels, stream: Any) -> Iterator[Line]:
    """Eight of 128 experts a token; tokens choose at random, so few share one."""
    for name, rows, k, quant, gated in EXPERTS:
        linear = Linear(kernels, FORMATS[quant])
        weights = random_weights(kernels.limits, quant, rows, k, gated=gated, span=SPAN_BYTES, experts=128)
        one, flops = int(weights[0].records[0].nbytes), 2 * rows * k * (2 if gated else 1)
        epilogue = Epilogue.SILU_F16 if gated else Epilogue.STORE_F32
        for m in (1, 8, 32, 64, 512):
            made = [
                random_groups(m, 8, 128, 8 if m <= 64 else 64, into=gated, seed=seed) for seed in range(len(weights))
            ]
            x = random_halves(m if gated else 8 * m, k)
            y = cp.empty((8 * m, rows), cp.float16 if gated else cp.float32)
            calls = [
                partial(linear, w, x, y, stream, epilogue, groups=groups)
                for w, (groups, _) in zip(weights, made, strict=True)
            ]
            size = one * sum(touched for _, touched in made) // len(made)
            yield line("experts", f"{name} {quant.name} {rows}x{k}", m, timed(stream, calls), size, 8 * m * flops)
        del weights
        cp.get_default_memory_pool().free_all_blocks()


def bench_attention(kernels: Kernels, stream: Any) -> Iterator[Line]:
    """32 heads over 8 kv heads of 128, f16 and int8; the rows of a decode have one context length."""
    heads, kv_heads, dim = HEADS
    for int8 in (False, True):
        attention, kind = Attention(kernels, dim, int8), "int8" if int8 else "f16"
        token_bytes = 2 * kv_heads * (dim + 2 if int8 else 2 * dim)
        for m, context in DECODE:
            size = m * context * token_bytes
            layers = max(1, min(16, SPAN_BYTES // size))
            cache, sequences = random_cache(layers, m, context, int8)
            room, q = Parts.of(Room.allocate(attention_buffers(m, heads, dim))), random_halves(m, heads * dim)
            rest = cp.full(m, context - 1, cp.int32), sequences, room, stream
            calls = [partial(attention.decode, q, cp.empty_like(q), cache, layer, *rest) for layer in range(layers)]
            seconds = timed(stream, calls)
            yield line("decode attention", f"{kind} context {context}", m, seconds, size, 4 * m * context * heads * dim)
            del cache, calls
            cp.get_default_memory_pool().free_all_blocks()
        for m, context in PREFILL:
            cache, _ = random_cache(1, 1, context, int8)
            q = random_halves(m, heads * dim)
            places = cp.arange(context - m, context, dtype=cp.int32), cp.zeros(m, cp.int32)
            seconds = timed(stream, [partial(attention.prefill, q, cp.empty_like(q), cache, 0, *places, stream)])
            pairs, size = m * (context - m) + m * (m + 1) // 2, context * token_bytes
            yield line("prefill attention", f"{kind} context {context}", m, seconds, size, 4 * pairs * heads * dim)


def bench_small(kernels: Kernels, stream: Any) -> Iterator[Line]:
    """The launches between the products, at the shapes of qwen3-8b and of qwen3-30b-a3b's router, and sampling."""
    for m in (1, 32, 512, 4096):
        for name, size, call in _small_calls(kernels, stream, m):
            yield line(name, "", m, timed(stream, [call] * 20), size, 0)
    vocab = 151936
    for name, sampling in SAMPLERS.items():
        for m in (1, 64):
            room = Room.allocate(sampler_buffers(vocab, slots=m, rows=m))
            sampler = Sampler(kernels, room, cp.zeros(m, cp.int32))
            for slot in range(m):
                sampler.admit(slot, sampling, [], [], stream)
            logits = cp.random.standard_normal((m, vocab), dtype=cp.float32) * 3
            rows, indices = cp.arange(m, dtype=cp.int32), cp.zeros(m, cp.int32)
            seconds = timed(stream, [partial(sampler, logits, rows, indices, stream)] * 10)
            yield line("sample", name, m, seconds, m * vocab * 4, 0)


def _small_calls(kernels: Kernels, stream: Any, m: int) -> Iterator[tuple[str, int, Call]]:
    """(op, bytes it must move, call)."""
    heads, kv_heads, dim = HEADS
    width, ffn, experts, used, hidden = heads * dim, 12288, 128, 8, 2048
    x, halves = cp.random.standard_normal((m, width), dtype=cp.float32), cp.empty((m, width), cp.float16)
    yield "rmsnorm", 6 * m * width, partial(Rmsnorm(kernels), x, cp.ones(width, cp.float32), 1e-6, halves, stream)
    fused = cp.random.standard_normal((m, (heads + 2 * kv_heads) * dim), dtype=cp.float32)
    cache, _ = random_cache(1, 1, max(m, 64), int8=False)
    places = cp.arange(m, dtype=cp.int32), cp.zeros(m, cp.int32)
    rotation = Rotation(cp.asarray(1e6 ** (-np.arange(dim // 2) / (dim // 2))), 1.0, False)
    norms = cp.ones(dim, cp.float32), cp.ones(dim, cp.float32), 1e-6
    yield "qkv", 6 * fused.size, partial(Qkv(kernels), fused, halves, cache, 0, rotation, *places, stream, norms)
    route, routing = Route(kernels), Routing.of(Room.allocate([*route_buffers(m * used), ITEM_COUNT]), m, used, experts)
    logits = cp.random.standard_normal((m, experts), dtype=cp.float32)
    yield "route", 4 * logits.size, partial(route, logits, places[0], True, routing, stream)
    parts, total = cp.zeros((m * used, hidden), cp.float32), cp.zeros((m, hidden), cp.float32)
    yield "route_add", 4 * (parts.size + 2 * total.size), partial(route.add, parts, total, places[0], routing, stream)
    both = cp.random.standard_normal((m, 2 * ffn), dtype=cp.float32)
    yield "silu_mul", 10 * m * ffn, partial(SiluMul(kernels), both, cp.empty((m, ffn), cp.float16), stream)


def line(op: str, what: str, m: int, seconds: float, size: int, flops: float) -> Line:
    rates = {"bytes_per_second": size / seconds, "flops_per_second": flops / seconds}
    return {"op": op, "what": what, "m": m, "microseconds": seconds * 1e6, **rates}


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
        sys.stdout.write(f"{device}, device copy {rate / 1e12:.2f} TB/s\n")
        lines = []
        for name in options.only.split(","):
            for found in BENCHES[name](kernels, stream):
                lines.append(found)
                bytes_rate, flops = found["bytes_per_second"], found["flops_per_second"] / 1e12
                head = f"{found['op']:18}{found['what']:44} m={found['m']:<5}{found['microseconds']:9.1f} us"
                sys.stdout.write(
                    f"{head} {bytes_rate / 1e12:6.2f} TB/s {bytes_rate / rate:5.0%} {flops:6.1f} TFLOP/s\n"
                )
    if options.json:
        options.json.write_text(json.dumps({"device": device, "copy_bytes_per_second": rate, "lines": lines}) + "\n")


if __name__ == "__main__":
    main()
