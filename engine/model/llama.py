"""llama (LLaMA, Mistral, SmolLM and their kin): pairwise rotary embedding, gated feed-forward layer."""

from engine.model.config import ModelConfig
from engine.model.layers import Block, Decoder, attention, decoder, feed_forward, norm
from engine.ops.backend import Weights


def llama(config: ModelConfig, weights: Weights) -> Decoder:
    def block(layer: int) -> Block:
        return Block(
            norm(config, weights, f"blk.{layer}.attn_norm"),
            attention(config, weights, layer, bias=config.qkv_bias),
            norm(config, weights, f"blk.{layer}.ffn_norm"),
            feed_forward(weights, layer),
        )

    return decoder(config, weights, block)
