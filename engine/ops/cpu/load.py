"""From an opened GGUF file to a pipeline that has run once: weights converted by all cores, kernels compiled."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.gguf import GgufFile
from engine.kv_cache.storage import KvStorage, allocate_kv, cpu_kv_dtype
from engine.model.config import ModelConfig
from engine.model.registry import build
from engine.model.size import layout
from engine.ops.backend import Heads
from engine.ops.cpu import compiled
from engine.ops.cpu.backend import CpuOps
from engine.ops.cpu.linear import NO_BIAS, Matrix
from engine.ops.cpu.memory import aligned_empty
from engine.ops.cpu.pipeline import CpuPipeline

Floats = npt.NDArray[np.float32]
Progress = Callable[[str, int, int], None]
"""(phase, done, total); the unit is the phase's own."""


class CpuWeights:
    """engine.ops.backend.Weights for the kernels: arrays are made at once and filled by `finish`."""

    def __init__(self, gguf: GgufFile, pool: ThreadPoolExecutor) -> None:
        self._gguf = gguf
        self._pool = pool
        self._jobs: list[tuple[int, Future[None]]] = []
        self.widest = 0

    def vector(self, name: str) -> Floats:
        return self._gguf.dequantised(name)

    def numbers(self, name: str) -> Floats:
        return self._gguf.dequantised(name)

    def matrix(self, *names: str, bias: tuple[str, ...] = ()) -> Matrix:
        biases = [self.vector(name) for name in bias]
        return self._stack(names, np.concatenate(biases) if biases else NO_BIAS)

    def gate_up(self, gate: str, up: str) -> Matrix:
        return self._stack((gate, up), NO_BIAS)

    def experts(self, name: str) -> Matrix:
        return self._stack((name,), NO_BIAS)

    def as_head(self, table: Matrix) -> Matrix:
        return table

    def finish(self, progress: Progress) -> None:
        """Fill all matrices. Raises ModelFileError for the first damaged tensor."""
        done, total = 0, sum(size for size, _ in self._jobs)
        for size, job in self._jobs:
            job.result()
            done += size
            progress("weights", done, total)

    def _stack(self, names: tuple[str, ...], bias: Floats) -> Matrix:
        infos = [self._gguf.tensor(name) for name in names]
        chosen = layout([info.quant for info in infos])
        experts = infos[0].shape[0] if len(infos[0].shape) == 3 else 1
        rows, cols = sum(info.shape[-2] for info in infos), infos[0].shape[-1]
        self.widest = max(self.widest, cols)
        shape = (experts, rows, cols)
        if chosen.group:
            groups = (experts, rows, cols // chosen.group)
            codes, scales = aligned_empty(shape, np.int8), aligned_empty(groups)
            offsets = aligned_empty(groups) if chosen.offset else None
            matrix = Matrix.quantised(codes, scales, offsets, chosen.group, bias)
        else:
            matrix = Matrix.plain(aligned_empty(shape), bias)
        row = 0
        for info in infos:
            part = slice(row, row + info.shape[-2])
            self._jobs.append((info.nbytes, self._pool.submit(self._fill, matrix, part, info.name, experts)))
            row += info.shape[-2]
        return matrix

    def _fill(self, matrix: Matrix, part: slice, name: str, experts: int) -> None:
        if matrix.codes is None:
            assert matrix.values is not None
            values = self._gguf.dequantised(name)
            matrix.values[:, part] = values.reshape(experts, -1, values.shape[-1])
            return
        found = self._gguf.codes(name)
        repeat = found.group // matrix.group
        matrix.codes[:, part] = found.codes.reshape(experts, -1, found.codes.shape[-1])
        scales = found.scale.reshape(experts, -1, found.scale.shape[-1])
        matrix.scales[:, part] = np.repeat(scales, repeat, axis=2) if repeat > 1 else scales
        if matrix.offset_step:
            offsets = np.zeros_like(scales) if found.offset is None else found.offset.reshape(scales.shape)
            matrix.offsets[:, part] = np.repeat(offsets, repeat, axis=2) if repeat > 1 else offsets


def load_cpu(
    gguf: GgufFile, model: ModelConfig, engine: EngineConfig, kv_blocks: int, progress: Progress
) -> CpuPipeline:
    """As `load_onto`, with `kv_blocks` blocks of KV in memory of its own."""
    kv = allocate_kv(cpu_kv_dtype(engine.kv_dtype), model.n_layers, kv_blocks, model.n_kv_heads, model.head_dim)
    return load_onto(gguf, model, engine, [kv], progress)


def load_onto(
    gguf: GgufFile, model: ModelConfig, engine: EngineConfig, kv: Sequence[KvStorage], progress: Progress
) -> CpuPipeline:
    """A pipeline ready to serve, with the KV of the layers of each stage in turn. It writes to block 0.

    Raises ModelFileError for a damaged tensor and ConfigError for a setting that cannot be met.
    """
    threads = compiled.start_threads(engine.threads)
    with ThreadPoolExecutor(threads, "load") as pool:
        weights = CpuWeights(gguf, pool)
        decoder = build(model, weights)
        weights.finish(progress)
    heads = Heads(model.n_heads, model.n_kv_heads, model.head_dim)
    pipeline = CpuPipeline(
        decoder, CpuOps(kv[0], heads, weights.widest, threads, kv[1:]), model.vocab, engine.max_batch
    )
    progress("kernels", 0, 1)
    compiled.first_run(pipeline.rehearse)
    progress("kernels", 1, 1)
    return pipeline
