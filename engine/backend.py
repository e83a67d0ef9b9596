"""A model loaded on a device, whatever that is: what the engine is built around, and the plain CPU's way to it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.gguf import GgufFile
from engine.kv_cache.blocks import BlockPool
from engine.kv_cache.pieces import KvPieces, Pieces
from engine.kv_cache.storage import allocate_kv, cpu_kv_dtype
from engine.ladder import Ladder, NoCards
from engine.memory.host import available_bytes
from engine.messages import DeviceReady
from engine.model.config import ModelConfig
from engine.model.size import kv_block_bytes, weights_bytes
from engine.pipeline import Pipeline
from engine.plan import plan_cpu

Progress = Callable[[str, int, int], None]
"""(phase, done, total); the unit is the phase's own."""


@dataclass(frozen=True, slots=True)
class Model:
    """An opened file and what it says; `fingerprint(kv type)` names all that the KV of a text depends on."""

    gguf: GgufFile
    config: ModelConfig
    fingerprint: Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What computes, what is behind its KV, and what was decided."""

    pipeline: Pipeline
    pool: BlockPool
    pieces: Pieces
    ladder: Ladder
    device: str
    kv_dtype: str
    kv_bytes: int
    weight_bytes: int
    max_context: int
    largest_chunk: int
    """More prompt tokens in one step than this are of no use to it."""
    devices: list[DeviceReady] = field(default_factory=list)
    layer_split: list[int] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Those parts of EngineConfig.without that it would have had."""


def load_host(config: EngineConfig, model: Model, progress: Progress) -> Backend:
    """The CPU with memory of the host's. Raises DoesNotFit or ConfigError before anything is allocated."""
    kv_dtype = cpu_kv_dtype(config.kv_dtype)
    plan = plan_cpu(
        config,
        model.config,
        weight_bytes=weights_bytes(model.gguf, model.config),
        block_bytes=kv_block_bytes(model.config, kv_dtype),
        available_bytes=available_bytes(),
    )
    shape = model.config.n_layers, plan.kv_blocks, model.config.n_kv_heads, model.config.head_dim
    storages = [allocate_kv(kv_dtype, *shape)]
    # Not at the top: it brings in numba, which takes longer than everything up to here and which no refusal needs.
    from engine.ops.cpu.load import load_onto
    from engine.ops.cpu.pipeline import LARGEST_CHUNK

    pipeline = load_onto(model.gguf, model.config, config, storages, progress)
    return Backend(
        pipeline=pipeline,
        pool=BlockPool(plan.kv_blocks, model.fingerprint(kv_dtype)),
        pieces=KvPieces(storages),
        ladder=Ladder(NoCards(), None, {}),
        device="cpu",
        kv_dtype=kv_dtype,
        kv_bytes=plan.kv_bytes,
        weight_bytes=plan.weight_bytes,
        max_context=plan.max_context,
        largest_chunk=LARGEST_CHUNK,
    )
