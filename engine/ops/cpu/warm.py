"""`python -m engine.ops.cpu.warm`: compile every kernel into numba's cache, so that no start and no request has to.

Kernels do not depend on shapes, so one small call of each op with each type of storage reaches all that traffic can.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np

from engine.kv_cache.storage import KvDtype, allocate_kv
from engine.ops.backend import HeadNorm, Heads, Rope
from engine.ops.cpu import compiled
from engine.ops.cpu.backend import CpuOps
from engine.ops.cpu.linear import Matrix
from engine.ops.cpu.philox import philox_words
from engine.ops.rows import Rows, Span

WIDTH, ROWS = 32, 4
DTYPES: tuple[KvDtype, ...] = ("f32", "f16", "int8")


def warm(wanted_threads: int | None = None, dtypes: Sequence[KvDtype] = DTYPES) -> None:
    """Compile, or load from the cache, every kernel. Raises ConfigError for threads that are not there."""
    threads = compiled.start_threads(wanted_threads)
    for dtype in dtypes:
        heads = Heads(2, 1, 8)
        _run(CpuOps(allocate_kv(dtype, 1, 1, heads.kv_heads, heads.dim), heads, WIDTH, threads), heads)
    philox_words(np.arange(1), 0, 0, 0)


def _run(ops: CpuOps, heads: Heads) -> None:
    weight = np.ones(WIDTH, np.float32)
    plain = Matrix.plain(np.zeros((1, ROWS * 8, WIDTH), np.float32))
    groups = np.zeros((1, ROWS * 8, 1), np.float32)
    quantised = Matrix.quantised(np.zeros((1, ROWS * 8, WIDTH), np.int8), groups, groups, WIDTH)
    step = ops.begin(Rows.of([Span([0] * ROWS, 0, [0])]), Rope(np.ones(4), 1.0, True))
    for table in (plain, quantised):
        x = ops.rmsnorm(ops.embed(table, step), weight, 1e-5)
        qkv = ops.linear(x, table)
    norm = HeadNorm(weight[:8], weight[:8], 1e-5)
    ops.attention(ops.qkv(qkv, heads, norm, 0, step), heads, 0, step)
    chosen, shares = ops.route(x, 1, True)
    gate_up = Matrix.plain(np.zeros((WIDTH, 2 * WIDTH, WIDTH), np.float32))
    down = Matrix.plain(np.zeros((WIDTH, WIDTH, WIDTH), np.float32))
    ops.experts(x, chosen, shares, gate_up, down, ops.take(x, np.arange(ROWS)))


def main() -> int:
    began = time.perf_counter()
    compiled.first_run(warm)
    seconds, where = time.perf_counter() - began, compiled.cache_folder() or "nowhere"
    sys.stdout.write(f"{len(compiled.variants())} kernels compiled or found in {seconds:.1f} s, kept in {where}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
