"""Everything the engine wants to know of a model, taken from the GGUF metadata once; nothing later reads raw keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from engine.gguf import GgufFile
from engine.gguf.file_type import quantisation_name
from engine.model.rope_config import FREQUENCY_FACTORS, RopeConfig

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
MIXTURES = ("qwen3moe",)
_SOFTMAX_GATING = 1
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one model. Sizes are in elements, contexts in tokens; expert fields are 0 when dense."""

    architecture: str
    name: str
    quantisation: str
    """Short name of the file's recipe, for example Q4_K_M."""
    parameters: int
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rms_eps: float
    rope: RopeConfig
    trained_context: int
    experts: int
    experts_used: int
    expert_ffn: int
    norm_topk: bool
    """The router's weights of the chosen experts are divided by their sum."""
    tied_embeddings: bool
    """The output head is the embedding matrix."""
    qk_norm: bool
    """RMS norm over each head of Q and K, before the rotary embedding."""
    qkv_bias: bool

    @classmethod
    def from_gguf(cls, gguf: GgufFile) -> Self:
        """Raises ModelFileError naming the key or tensor that is missing, impossible or not supported."""
        architecture = gguf.text("general.architecture")
        if architecture not in SUPPORTED_ARCHITECTURES:
            supported = ", ".join(SUPPORTED_ARCHITECTURES)
            gguf.fail("general.architecture", f"architecture {architecture} is not supported; supported: {supported}")
        hidden, heads, kv_heads, head_dim = _attention(gguf, architecture)
        experts, experts_used, expert_ffn = _experts(gguf, architecture)
        context = _trained_context(gguf, architecture)
        config = cls(
            architecture=architecture,
            name=gguf.text("general.name", ""),
            quantisation=quantisation_name(gguf),
            parameters=sum(info.elements for info in gguf.tensors.values()),
            n_layers=_count(gguf, f"{architecture}.block_count"),
            hidden=hidden,
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=0 if experts else _count(gguf, f"{architecture}.feed_forward_length"),
            vocab=_vocab(gguf),
            rms_eps=_rms_eps(gguf, architecture),
            rope=RopeConfig.from_gguf(gguf, architecture, head_dim, context),
            trained_context=context,
            experts=experts,
            experts_used=experts_used,
            expert_ffn=expert_ffn,
            norm_topk=gguf.flag(f"{architecture}.expert_weights_norm", architecture in MIXTURES),
            tied_embeddings="output.weight" not in gguf.tensors,
            qk_norm=architecture in ("qwen3", "qwen3moe"),
            qkv_bias=architecture == "qwen2" or (architecture == "llama" and "blk.0.attn_q.bias" in gguf.tensors),
        )
        _check_tensors(gguf, config)
        return config

    def tensor_shapes(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape (NumPy order, [rows, cols]) of every tensor of the model; a file must hold exactly these."""
        yield "token_embd.weight", (self.vocab, self.hidden)
        yield "output_norm.weight", (self.hidden,)
        if not self.tied_embeddings:
            yield "output.weight", (self.vocab, self.hidden)
        if self.rope.frequency_factors:
            yield FREQUENCY_FACTORS, (self.rope.dims // 2,)
        for layer in range(self.n_layers):
            for name, shape in (*self._attention_shapes(), *self._feed_forward_shapes()):
                yield f"blk.{layer}.{name}", shape

    def _attention_shapes(self) -> Iterator[tuple[str, Shape]]:
        hidden, heads, kv_heads = self.hidden, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        yield "attn_norm.weight", (hidden,)
        for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"attn_{part}.weight", (rows, hidden)
            if self.qkv_bias:
                yield f"attn_{part}.bias", (rows,)
        if self.qk_norm:
            yield "attn_q_norm.weight", (self.head_dim,)
            yield "attn_k_norm.weight", (self.head_dim,)
        yield "attn_output.weight", (hidden, heads)

    def _feed_forward_shapes(self) -> Iterator[tuple[str, Shape]]:
        hidden, ffn, experts = self.hidden, self.ffn, self.experts
        yield "ffn_norm.weight", (hidden,)
        if experts:
            yield "ffn_gate_inp.weight", (experts, hidden)
            yield "ffn_gate_exps.weight", (experts, self.expert_ffn, hidden)
            yield "ffn_up_exps.weight", (experts, self.expert_ffn, hidden)
            yield "ffn_down_exps.weight", (experts, hidden, self.expert_ffn)
        else:
            yield "ffn_gate.weight", (ffn, hidden)
            yield "ffn_up.weight", (ffn, hidden)
            yield "ffn_down.weight", (hidden, ffn)


def _attention(gguf: GgufFile, architecture: str) -> tuple[int, int, int, int]:
    """(hidden, heads, kv heads, head dimension). Without `key_length` the heads share the hidden size out."""
    attention = f"{architecture}.attention."
    hidden = _count(gguf, f"{architecture}.embedding_length")
    heads = _count(gguf, attention + "head_count")
    kv_heads = _count(gguf, attention + "head_count_kv", heads)
    if heads % kv_heads:
        gguf.fail(attention + "head_count_kv", f"{kv_heads} KV heads do not divide {heads} heads")
    if attention + "key_length" not in gguf.metadata and hidden % heads:
        gguf.fail(attention + "head_count", f"{heads} heads do not divide the embedding length {hidden}")
    head_dim = _count(gguf, attention + "key_length", hidden // heads)
    value_dim = gguf.u32(attention + "value_length", head_dim)
    if value_dim != head_dim:
        gguf.fail(attention + "value_length", f"{value_dim} differs from the key length {head_dim}: not supported")
    if not gguf.flag(attention + "causal", True):
        gguf.fail(attention + "causal", "attention without a causal mask is not supported")
    return hidden, heads, kv_heads, head_dim


def _experts(gguf: GgufFile, architecture: str) -> tuple[int, int, int]:
    """(experts, experts used, feed-forward size of one); zeros in a dense model."""
    expert = f"{architecture}.expert_"
    if architecture not in MIXTURES:
        if gguf.u32(expert + "count", 0):
            gguf.fail(expert + "count", f"experts in the architecture {architecture} are not supported")
        return 0, 0, 0
    experts, used = _count(gguf, expert + "count"), _count(gguf, expert + "used_count")
    if used > experts:
        gguf.fail(expert + "used_count", f"{used} of {experts} experts cannot be used")
    if gguf.u32(expert + "gating_func", _SOFTMAX_GATING) != _SOFTMAX_GATING:
        gguf.fail(expert + "gating_func", "only softmax gating is supported")
    if gguf.f32(expert + "weights_scale", 1.0) not in (0.0, 1.0):
        gguf.fail(expert + "weights_scale", "scaled expert weights are not supported")
    return experts, used, _count(gguf, expert + "feed_forward_length")


def _trained_context(gguf: GgufFile, architecture: str) -> int:
    """Up to the sliding window, where there is one, full attention is the same: that much is supported."""
    context = _count(gguf, f"{architecture}.context_length")
    return min(context, gguf.u32(f"{architecture}.attention.sliding_window", 0) or context)


def _vocab(gguf: GgufFile) -> int:
    """Rows of the embedding. `vocab_size` is not read: converters write it before they pad or add tokens."""
    rows = gguf.tensor("token_embd.weight").shape[0]
    tokens = gguf.array("tokenizer.ggml.tokens", None)
    if tokens is not None and len(tokens) != rows:
        gguf.fail("tokenizer.ggml.tokens", f"has {len(tokens)} tokens, but token_embd.weight has {rows} rows")
    return rows


def _rms_eps(gguf: GgufFile, architecture: str) -> float:
    key = f"{architecture}.attention.layer_norm_rms_epsilon"
    eps = gguf.f32(key)
    if not 0 < eps < 1:
        gguf.fail(key, f"{eps} is not between 0 and 1")
    return eps


def _check_tensors(gguf: GgufFile, config: ModelConfig) -> None:
    """A tensor left over means that the file asks for more than is computed here: its answers would be wrong."""
    used = set()
    for name, shape in config.tensor_shapes():
        found = gguf.tensor(name).shape
        if found != shape:
            gguf.fail(name, f"has shape {list(found)}, the metadata say {list(shape)}")
        used.add(name)
    unused = next((name for name in gguf.tensors if name not in used), None)
    if unused is not None:
        gguf.fail(unused, f"this tensor is not part of the {config.architecture} model that this engine computes")


def _count(gguf: GgufFile, key: str, default: int | None = None) -> int:
    value = gguf.u32(key) if default is None else gguf.u32(key, default)
    if value == 0:
        gguf.fail(key, "is 0, expected at least 1")
    return value
