"""How many bytes a model takes on the CPU, from its file's header alone: known before anything is read."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import BLOCK_TOKENS
from engine.gguf import GgufFile, TensorInfo
from engine.gguf.quants import QUANTS, QuantType
from engine.kv_cache.storage import kv_token_bytes
from engine.model.config import ModelConfig
from engine.model.registry import build

F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """How the CPU kernels hold a matrix: int8 codes with a float32 scale, perhaps an offset, per `group` weights; with
    group 0 as float32."""

    group: int
    offset: bool

    def nbytes(self, weights: int) -> int:
        if self.group == 0:
            return weights * F32_BYTES
        return weights + weights // self.group * F32_BYTES * (1 + self.offset)


def layout(quants: list[QuantType]) -> Layout:
    """One layout for matrices that are stacked: the finest group; float32 if one of them has no codes."""
    specs = [QUANTS[quant] for quant in quants]
    if any(spec.unpack is None for spec in specs):
        return Layout(0, False)
    return Layout(min(spec.group for spec in specs), any(_has_offset(quant) for quant in quants))


def _has_offset(quant: QuantType) -> bool:
    spec = QUANTS[quant]
    return spec.unpack is not None and spec.unpack(np.zeros(1, spec.layout))[2] is not None


class _Sum:
    """engine.ops.backend.Weights that only adds up."""

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf = gguf
        self.total = 0

    def vector(self, name: str) -> Any:
        self.total += self.gguf.tensor(name).elements * F32_BYTES

    def numbers(self, name: str) -> npt.NDArray[np.float32]:
        return np.ones(self.gguf.tensor(name).elements, np.float32)

    def matrix(self, *names: str, bias: tuple[str, ...] = ()) -> Any:
        infos: list[TensorInfo] = [self.gguf.tensor(name) for name in names]
        self.total += layout([info.quant for info in infos]).nbytes(sum(info.elements for info in infos))
        for name in bias:
            self.vector(name)

    def gate_up(self, gate: str, up: str) -> Any:
        self.matrix(gate, up)

    def experts(self, name: str) -> Any:
        self.matrix(name)

    def as_head(self, table: Any) -> Any:
        return table


def weights_bytes(gguf: GgufFile, config: ModelConfig) -> int:
    """Bytes of all weights as the CPU kernels hold them."""
    weights = _Sum(gguf)
    build(config, weights)
    return weights.total


def kv_block_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of the K and V of 64 tokens over all layers."""
    return BLOCK_TOKENS * kv_token_bytes(dtype, config.n_layers, config.n_kv_heads, config.head_dim)
