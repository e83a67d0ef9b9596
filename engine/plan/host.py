"""The plan for the host's own memory, where no card is in play."""

from dataclasses import dataclass

from engine.config import BLOCK_TOKENS, EngineConfig
from engine.errors import ConfigError, DoesNotFit
from engine.model.config import ModelConfig
from engine.plan.scratch import host_scratch_bytes
from engine.plan.sizes import mib_up

CPU_SLICE_ROWS = 256
"""The CPU pipeline computes at most so many rows at once (engine.ops.cpu.pipeline.SLICE_ROWS, a test compares them)."""
_KV_SHARE = 4
"""Of the memory that is available the KV pool takes at most one part in so many, unless it is told otherwise."""
_KV_SEQUENCES = 64
"""More full contexts than this are never of use at once."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Bytes by owner, and what they buy: `kv_blocks` blocks, so that one sequence of `max_context` tokens fits."""

    max_context: int
    kv_blocks: int
    weight_bytes: int
    kv_bytes: int
    scratch_bytes: int


def plan_cpu(
    config: EngineConfig, model: ModelConfig, *, weight_bytes: int, block_bytes: int, available_bytes: int
) -> CpuPlan:
    """The plan for host memory.

    The pool is a quarter of what is available, at most 64 sequences of `max_context`, and never less than one;
    `kv_pool_mib` sets it outright. `max_context` is what was trained, or as much of it as the pool holds.

    Raises ConfigError for a context beyond what was trained, DoesNotFit with all figures otherwise.
    """
    path = config.model_path
    if config.max_context is not None and config.max_context > model.trained_context:
        raise ConfigError(
            f"{path}: {model.architecture}.context_length: the model was trained for {model.trained_context} tokens, "
            f"--max-context {config.max_context} asks for more"
        )
    scratch = host_scratch_bytes(model, rows=CPU_SLICE_ROWS, batch=config.max_batch)
    room = max(0, available_bytes - weight_bytes - scratch)
    asked = config.kv_pool_mib
    pool = min(available_bytes // _KV_SHARE, room) if asked is None else asked << 20
    context = config.max_context or min(model.trained_context, max(1, pool // block_bytes) * BLOCK_TOKENS)
    least = -(-context // BLOCK_TOKENS) * block_bytes
    if asked is None:
        pool = max(least, min(pool, _KV_SEQUENCES * least))
    elif pool < least:
        raise DoesNotFit(
            f"{path}: --kv-pool-mib {asked} does not hold one sequence of {context} tokens, which takes "
            f"{mib_up(least)} MiB: give more, or a smaller --max-context"
        )
    if pool > room:
        raise DoesNotFit(
            f"{path}: needs {mib_up(weight_bytes)} MiB for weights, {mib_up(pool)} MiB for keys and values of at least "
            f"one sequence of {context} tokens and {mib_up(scratch)} MiB of scratch, but only "
            f"{mib_up(available_bytes)} MiB of memory are available: {_mend(asked, room, block_bytes)}"
        )
    blocks = pool // block_bytes
    return CpuPlan(context, blocks, weight_bytes, blocks * block_bytes, scratch)


def _mend(kv_pool_mib: int | None, room: int, block_bytes: int) -> str:
    if room < block_bytes:
        return "take a smaller model or quantisation"
    if kv_pool_mib is not None:
        return f"--kv-pool-mib {room >> 20} would fit"
    return f"--max-context {room // block_bytes * BLOCK_TOKENS} would fit"
