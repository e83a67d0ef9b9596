"""qwen3moe (Qwen3 30B-A3B and its kin): as qwen3, with a router and experts in place of the feed-forward layer."""

from engine.model.config import ModelConfig
from engine.model.layers import Block, Decoder, attention, decoder, mixture, norm
from engine.ops.backend import Weights


def qwen3moe(config: ModelConfig, weights: Weights) -> Decoder:
    def block(layer: int) -> Block:
        return Block(
            norm(config, weights, f"blk.{layer}.attn_norm"),
            attention(config, weights, layer, head_norm=True),
            norm(config, weights, f"blk.{layer}.ffn_norm"),
            mixture(config, weights, layer),
        )

    return decoder(config, weights, block)
