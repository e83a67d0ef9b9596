"""qwen2 (Qwen2, Qwen2.5): as llama, with halves turned instead of pairs and a bias on Q, K and V."""

from engine.model.config import ModelConfig
from engine.model.layers import Block, Decoder, attention, decoder, feed_forward, norm
from engine.ops.backend import Weights


def qwen2(config: ModelConfig, weights: Weights) -> Decoder:
    def block(layer: int) -> Block:
        return Block(
            norm(config, weights, f"blk.{layer}.attn_norm"),
            attention(config, weights, layer, bias=True),
            norm(config, weights, f"blk.{layer}.ffn_norm"),
            feed_forward(weights, layer),
        )

    return decoder(config, weights, block)
