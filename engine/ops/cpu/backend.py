"""The ops of the CPU kernels, bound to one KV storage: allocates results, picks scratch, hands over to the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from engine.kv_cache.storage import KvStorage
from engine.ops.backend import HeadNorm, Heads, Rope
from engine.ops.cpu import attention, embed, experts, rmsnorm, rope, route, silu_mul, store
from engine.ops.cpu.linear import Matrix, linear
from engine.ops.cpu.memory import Results, aligned_empty
from engine.ops.cpu.tile import TILE
from engine.ops.rows import Ints, Rows

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class CpuStep:
    rows: Rows
    cos: Floats
    sin: Floats
    interleaved: bool
    pieces: Ints


class CpuOps:
    """engine.ops.backend.Ops on numba kernels. `widest`: the most columns of any weight matrix.

    `kv` is of the first layers and each of `later` of those that follow: the stages of simulated cards, which all
    compute on this one CPU and differ in whose memory their K and V are.
    """

    def __init__(self, kv: KvStorage, heads: Heads, widest: int, threads: int, later: Sequence[KvStorage] = ()) -> None:
        self.kv = kv
        self._places = [(stage, layer) for stage in (kv, *later) for layer in range(len(stage.data))]
        self.threads = threads
        self._heads = heads
        self._results = Results()
        self._panels: Floats = aligned_empty((threads, TILE * widest))
        self._scratch: Floats = aligned_empty((threads, attention.scratch_elements(heads)))

    def begin(self, rows: Rows, turn: Rope) -> CpuStep:
        numba.set_num_threads(self.threads)  # numba keeps this per calling thread
        cos, sin = rope.angles(rows.positions, turn.frequencies, turn.magnitude)
        return CpuStep(rows, cos, sin, turn.interleaved, attention.pieces(rows.spans, self._heads))

    def embed(self, table: Matrix, step: CpuStep) -> Floats:
        out = self._results.take(len(step.rows), table.shape[2])
        embed.embed(step.rows.tokens, table, out)
        return out

    def rmsnorm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        out = self._results.take(*x.shape)
        rmsnorm.rmsnorm(x, weight, eps, out, self.threads)
        return out

    def linear(self, x: Floats, matrix: Matrix, onto: Floats | None = None) -> Floats:
        starts = np.array((0, len(x)))
        if onto is not None:
            linear(x, starts, matrix, onto, self._panels, onto=True)
            return onto
        out = self._results.take(len(x), matrix.shape[1])
        linear(x, starts, matrix, out, self._panels)
        return out

    def qkv(self, qkv: Floats, heads: Heads, norm: HeadNorm | None, layer: int, step: CpuStep) -> Floats:
        if norm is not None:
            rmsnorm.head_norm(qkv, heads, *norm, self.threads)
        rope.rope(qkv, heads, step.cos, step.sin, step.interleaved, self.threads)
        store.store(qkv, heads, step.rows, *self._places[layer])
        return qkv

    def attention(self, q: Floats, heads: Heads, layer: int, step: CpuStep) -> Floats:
        out = self._results.take(len(q), heads.heads * heads.dim)
        attention.attention(q, heads, step.pieces, step.rows.tables, *self._places[layer], out, self._scratch)
        return out

    def swiglu(self, x: Floats, gate_up: Matrix) -> Floats:
        out = self._results.take(len(x), gate_up.shape[1] // 2)
        silu_mul.silu_mul(self.linear(x, gate_up), out, self.threads)
        return out

    def route(self, logits: Floats, used: int, normalise: bool) -> tuple[Ints, Floats]:
        return route.route(logits, used, normalise)

    def experts(self, x: Floats, chosen: Ints, shares: Floats, gate_up: Matrix, down: Matrix, onto: Floats) -> Floats:
        experts.experts(x, chosen, shares, gate_up, down, onto, self._panels, self._results)
        return onto

    def take(self, x: Floats, places: Ints) -> Floats:
        out = self._results.take(len(places), x.shape[1])
        np.take(x, places, axis=0, out=out)
        return out
