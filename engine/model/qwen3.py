"""qwen3: as qwen2, with a norm over each head of Q and K in place of the biases."""

from engine.model.config import ModelConfig
from engine.model.layers import Block, Decoder, attention, decoder, feed_forward, norm
from engine.ops.backend import Weights


def qwen3(config: ModelConfig, weights: Weights) -> Decoder:
    def block(layer: int) -> Block:
        return Block(
            norm(config, weights, f"blk.{layer}.attn_norm"),
            attention(config, weights, layer, head_norm=True),
            norm(config, weights, f"blk.{layer}.ffn_norm"),
            feed_forward(weights, layer),
        )

    return decoder(config, weights, block)
