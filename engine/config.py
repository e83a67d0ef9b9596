"""What the service tells an engine at the handshake; frozen for the engine's life."""

import msgspec

from engine.faults import NvmlLoss, Poison, parse_faults

__all__ = ["BLOCK_TOKENS", "EngineConfig", "NvmlLoss", "Poison", "parse_faults"]

BLOCK_TOKENS = 64
"""Tokens in one KV block (design: a multiple of every attention tile)."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine process. `None` means: chosen from the model and the room there is."""

    model_path: str
    device: str = "cpu"
    kv_dtype: str = "auto"
    max_context: int | None = None
    max_batch: int = 64
    kv_pool_mib: int | None = None
    prefill_chunk: int = 512
    prefill_chunk_idle: int = 4096
    prefill_chunk_fixed: bool = False
    threads: int | None = None
    devices: tuple[int, ...] = ()
    """Devices of the stages in order; one may come twice. Empty: every device there is."""
    layer_split: tuple[int, ...] | None = None
    """Layers of each stage; None: the plan chooses."""
    vram_reserve_mib: tuple[int, ...] = (512,)
    """R, one for all devices or one each."""
    vram_reserve_later_mib: int | None = None
    simulated_gpus: str | None = None
    """Path of the mapped file that stands for the cards; made by the service."""
    faults: str = ""
    without: tuple[str, ...] = ()
    """Optional parts a fallback plan leaves out: "shadow", "graph buckets"."""
