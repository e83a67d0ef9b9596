"""The bricks that the architectures are built of. `x` is the stream of rows that every block adds to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.model.config import ModelConfig
from engine.model.rope import rope
from engine.ops.backend import Array, Batch, HeadNorm, Heads, Matrix, Ops, Rope, Step, Weights


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Array
    eps: float

    def __call__(self, ops: Ops, x: Array) -> Array:
        return ops.rmsnorm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Attention:
    """x += out · attention(qkv · h), of one layer's cache."""

    layer: int
    heads: Heads
    qkv: Matrix
    head_norm: HeadNorm | None
    out: Matrix

    def __call__(self, ops: Ops, h: Array, x: Array, step: Step) -> Array:
        q = ops.qkv(ops.linear(h, self.qkv), self.heads, self.head_norm, self.layer, step)
        mixed = ops.attention(q, self.heads, self.layer, step)
        return ops.linear(mixed, self.out, onto=x)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """x += down · (silu(gate · h) * up · h)."""

    gate_up: Matrix
    down: Matrix

    def __call__(self, ops: Ops, h: Array, x: Array) -> Array:
        return ops.linear(ops.swiglu(h, self.gate_up), self.down, onto=x)


@dataclass(frozen=True, slots=True)
class Mixture:
    """x += the shares of the best `used` experts, each a feed-forward layer, that the router gives a row."""

    router: Matrix
    used: int
    normalise: bool
    gate_up: Matrix
    down: Matrix

    def __call__(self, ops: Ops, h: Array, x: Array) -> Array:
        chosen, shares = ops.route(ops.linear(h, self.router), self.used, self.normalise)
        return ops.experts(h, chosen, shares, self.gate_up, self.down, onto=x)


class Mixer(Protocol):
    """What stands after the second norm of a block."""

    def __call__(self, ops: Ops, h: Array, x: Array) -> Array: ...


@dataclass(frozen=True, slots=True)
class Block:
    attention_norm: Norm
    attention: Attention
    mixer_norm: Norm
    mixer: Mixer

    def __call__(self, ops: Ops, x: Array, step: Step) -> Array:
        x = self.attention(ops, self.attention_norm(ops, x), x, step)
        return self.mixer(ops, self.mixer_norm(ops, x), x)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Embedding, blocks, last norm and head: the whole of a text model."""

    embedding: Matrix
    rope: Rope
    blocks: tuple[Block, ...]
    norm: Norm
    head: Matrix

    def hidden(self, ops: Ops, rows: Batch) -> Array:
        """The stream after the last block: [rows, hidden]. K and V of every row are stored on the way."""
        step = ops.begin(rows, self.rope)
        x = ops.embed(self.embedding, step)
        for block in self.blocks:
            x = block(ops, x, step)
        return x

    def logits(self, ops: Ops, x: Array, places: Array) -> Array:
        """Logits of the rows of `x` at `places`: [places, vocab]."""
        return ops.linear(self.norm(ops, ops.take(x, places)), self.head)


def norm(config: ModelConfig, weights: Weights, name: str) -> Norm:
    return Norm(weights.vector(f"{name}.weight"), config.rms_eps)


def attention(
    config: ModelConfig, weights: Weights, layer: int, *, bias: bool = False, head_norm: bool = False
) -> Attention:
    """`bias`: Q, K and V have one; `head_norm`: every head of Q and K is normalised before it is turned."""
    prefix = f"blk.{layer}.attn_"
    norm_of_heads = None
    if head_norm:
        q_weight, k_weight = (weights.vector(f"{prefix}{part}_norm.weight") for part in "qk")
        norm_of_heads = HeadNorm(q_weight, k_weight, config.rms_eps)
    return Attention(
        layer=layer,
        heads=Heads(config.n_heads, config.n_kv_heads, config.head_dim),
        qkv=weights.matrix(
            *(f"{prefix}{part}.weight" for part in "qkv"),
            bias=tuple(f"{prefix}{part}.bias" for part in "qkv" if bias),
        ),
        head_norm=norm_of_heads,
        out=weights.matrix(f"{prefix}output.weight"),
    )


def feed_forward(weights: Weights, layer: int) -> FeedForward:
    prefix = f"blk.{layer}.ffn_"
    return FeedForward(
        gate_up=weights.gate_up(f"{prefix}gate.weight", f"{prefix}up.weight"),
        down=weights.matrix(f"{prefix}down.weight"),
    )


def mixture(config: ModelConfig, weights: Weights, layer: int) -> Mixture:
    prefix = f"blk.{layer}.ffn_"
    return Mixture(
        router=weights.matrix(f"{prefix}gate_inp.weight"),
        used=config.experts_used,
        normalise=config.norm_topk,
        gate_up=weights.gate_up(f"{prefix}gate_exps.weight", f"{prefix}up_exps.weight"),
        down=weights.experts(f"{prefix}down_exps.weight"),
    )


def decoder(config: ModelConfig, weights: Weights, block: Callable[[int], Block]) -> Decoder:
    """The parts that all architectures share, around the blocks 0 to n_layers - 1."""
    embedding = weights.matrix("token_embd.weight")
    return Decoder(
        embedding=embedding,
        rope=rope(config.rope, weights),
        blocks=tuple(block(layer) for layer in range(config.n_layers)),
        norm=norm(config, weights, "output_norm"),
        head=weights.as_head(embedding) if config.tied_embeddings else weights.matrix("output.weight"),
    )
