"""Which function builds which architecture (the value of `general.architecture`)."""

from collections.abc import Callable

from engine.model.config import ModelConfig
from engine.model.layers import Decoder
from engine.model.llama import llama
from engine.model.qwen2 import qwen2
from engine.model.qwen3 import qwen3
from engine.model.qwen3moe import qwen3moe
from engine.ops.backend import Weights

ARCHITECTURES: dict[str, Callable[[ModelConfig, Weights], Decoder]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
}


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """The network with its weights. Raises ModelFileError for a damaged tensor."""
    return ARCHITECTURES[config.architecture](config, weights)
