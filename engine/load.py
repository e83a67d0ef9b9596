"""From a parsed file to an engine that serves: plan, allocate, load, take over carried KV."""

import os
import time
from pathlib import Path

from engine.backend import Backend, Model, Progress, load_host
from engine.cards import load_cards
from engine.channel import Channel
from engine.checkpoint import Carrier, Restored
from engine.config import EngineConfig
from engine.errors import ConfigError, DoesNotFit
from engine.faults import parse_faults
from engine.gguf import open_gguf
from engine.injection import FaultyOutbox, FaultyPipeline, Happened
from engine.kv_cache.storage import cpu_kv_dtype
from engine.loop import EngineLoop
from engine.memory.simulated_gpus import SimulatedGpus
from engine.messages import LoadProgress, Ready
from engine.model.config import ModelConfig
from engine.scheduler import Scheduler


def parse(path: str, model_fd: int, build: str) -> Model:
    """Open the file by its descriptor; `path` is for messages. Raises ModelFileError."""
    status = os.fstat(model_fd)
    file = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
    gguf = open_gguf(path, model_fd)
    return Model(gguf, ModelConfig.from_gguf(gguf), lambda kv_dtype: f"{file} {kv_dtype} {build}")


def prepare(config: EngineConfig) -> None:
    """What takes long and touches no device: a successor has it behind it before it is told to load.

    Raises ConfigError.
    """
    # Not at the top: an engine that loads at once refuses what it must before it spends time on this.
    from engine.ops.cpu.compiled import first_run
    from engine.ops.cpu.warm import warm

    first_run(lambda: warm(config.threads, [cpu_kv_dtype(config.kv_dtype)]))


def load(
    config: EngineConfig, model: Model, channel: Channel, carry_fd: int | None, *, restore: bool
) -> tuple[EngineLoop, Ready]:
    """Carried KV is taken over if `restore`. Raises ModelFileError, DoesNotFit or ConfigError, these two before
    anything large is allocated, and OutOfMemory where a card has less than it said.
    """
    began = time.monotonic()

    def progress(phase: str, done: int, total: int) -> None:
        channel.send(LoadProgress(phase, done, total))

    faults = parse_faults(config.faults, cards_there(config))
    backend = load_backend(config, model, progress)
    scheduler = Scheduler(
        backend.pool,
        config.max_batch,
        backend.max_context,
        config.prefill_chunk,
        max(config.prefill_chunk, min(config.prefill_chunk_idle, backend.largest_chunk)),
        config.prefill_chunk_fixed,
    )
    carrier, restored = None, Restored()
    if carry_fd is not None:
        [paged] = scheduler.kinds
        carrier = Carrier(carry_fd, model.fingerprint(backend.kv_dtype), [(paged, backend.pieces)])
        if restore:
            progress("restore", 0, 1)
            restored = carrier.restore()
            progress("restore", 1, 1)
    ready = _ready(config, backend, restored, time.monotonic() - began)
    if not faults:
        return EngineLoop(backend.pipeline, scheduler, channel, channel, backend.ladder, carrier), ready
    happened = Happened(carry_fd)
    pipeline = FaultyPipeline(backend.pipeline, faults, happened, config.simulated_gpus)
    outbox = FaultyOutbox(channel, faults, happened)
    return EngineLoop(pipeline, scheduler, channel, outbox, backend.ladder, carrier), ready


def load_backend(config: EngineConfig, model: Model, progress: Progress) -> Backend:
    """The one place where the device is chosen. Raises ConfigError for one that this build does not have."""
    if config.device not in ("auto", "cpu"):
        raise ConfigError(f"--device {config.device}: this build runs on the cpu only")
    try:
        return (load_cards if config.simulated_gpus is not None else load_host)(config, model, progress)
    except MemoryError as error:
        raise DoesNotFit(f"{config.model_path}: memory ran out while loading: {error}") from error


def cards_there(config: EngineConfig) -> int:
    """How many simulated cards there are."""
    if config.simulated_gpus is None:
        return 0
    gpus = SimulatedGpus.open(Path(config.simulated_gpus))
    try:
        return len(gpus.cards)
    finally:
        gpus.close()


def _ready(config: EngineConfig, backend: Backend, restored: Restored, seconds: float) -> Ready:
    return Ready(
        device=backend.device,
        max_context=backend.max_context,
        max_batch=config.max_batch,
        kv_dtype=backend.kv_dtype,
        kv_blocks=backend.pool.n_blocks,
        kv_bytes=backend.kv_bytes,
        weight_bytes=backend.weight_bytes,
        load_seconds=seconds,
        devices=backend.devices,
        restored_blocks=restored.pieces,
        layer_split=backend.layer_split,
        dropped=backend.dropped,
        skipped_blocks=restored.skipped,
    )
