"""ModelConfig against the golden manifests, and against metadata that contradict themselves or the tensors."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelFileError
from engine.gguf import open_gguf
from engine.gguf.quants import QuantType
from engine.model.config import ModelConfig
from tests.engine.gguf.building import Draft, Tensor, draft_of
from tests.golden.cases import GoldenCase, golden_cases

SMALL = ("llama-Q4_1-s1", "qwen2-F32-s4", "qwen3-Q8_0-s5", "qwen3moe-8x2-Q4_0-s1")


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case.name)
def test_a_golden_file_has_the_configuration_of_its_manifest(case: GoldenCase) -> None:
    config, expected = ModelConfig.from_gguf(open_gguf(str(case.model))), case.manifest["config"]
    rope = expected["rope_parameters"]
    heads, hidden = expected["num_attention_heads"], expected["hidden_size"]
    assert config.architecture == case.manifest["arch"]
    assert config.quantisation in (case.manifest["quant"], "Q4_K")  # MIX_K_M has no name of its own in the file
    assert config.n_layers == expected["num_hidden_layers"]
    assert (config.hidden, config.n_heads) == (hidden, heads)
    assert config.n_kv_heads == expected["num_key_value_heads"]
    assert config.head_dim == expected.get("head_dim", hidden // heads)
    assert config.vocab == expected["vocab_size"]
    assert config.rms_eps == pytest.approx(expected["rms_norm_eps"])
    assert config.trained_context == expected["max_position_embeddings"]
    assert config.tied_embeddings == expected["tie_word_embeddings"]
    assert config.rope.theta == pytest.approx(rope["rope_theta"])
    assert config.rope.dims == config.head_dim
    assert (config.rope.scaling, config.rope.factor) == ("none", 1.0)
    assert config.rope.frequency_factors == (rope["rope_type"] == "llama3")
    assert config.rope.interleaved == (config.architecture == "llama")
    assert config.qkv_bias == (config.architecture == "qwen2")
    assert config.qk_norm == config.architecture.startswith("qwen3")
    assert config.experts == expected.get("num_local_experts", 0)
    if config.experts:
        assert config.experts_used == expected["num_experts_per_tok"]
        assert config.expert_ffn == expected["moe_intermediate_size"]
        assert config.norm_topk == expected["norm_topk_prob"]
    else:
        assert config.ffn == expected["intermediate_size"]


MODELS = {case.manifest["arch"]: case.model for case in golden_cases() if case.name in SMALL}


def draft(architecture: str) -> Draft:
    return draft_of(open_gguf(str(MODELS[architecture])))


def read(draft: Draft, folder: Path) -> ModelConfig:
    return ModelConfig.from_gguf(open_gguf(draft.write(folder)))


@pytest.mark.parametrize(
    ("architecture", "key", "value", "message"),
    [
        ("llama", "general.architecture", None, "this metadata key is missing"),
        ("llama", "general.architecture", "gemma3", "architecture gemma3 is not supported; supported: llama, qwen2"),
        ("llama", "llama.embedding_length", None, "this metadata key is missing"),
        ("llama", "llama.embedding_length", 0, "is 0, expected at least 1"),
        ("llama", "llama.context_length", "long", "expected a whole number, found 'long'"),
        ("llama", "llama.attention.head_count", [4, 4, 4], "expected a whole number, found an array"),
        ("llama", "llama.attention.head_count_kv", 3, "3 KV heads do not divide 4 heads"),
        ("llama", "llama.attention.value_length", 16, "16 differs from the key length 32"),
        ("llama", "llama.attention.causal", False, "attention without a causal mask"),
        ("llama", "llama.attention.layer_norm_rms_epsilon", float("nan"), "nan is not a finite number"),
        ("llama", "llama.attention.layer_norm_rms_epsilon", 0.0, "0.0 is not between 0 and 1"),
        ("llama", "llama.rope.freq_base", 0.0, "0.0 is not a positive number"),
        ("llama", "llama.rope.dimension_count", 31, "31 is not an even number from 2 to the head dimension 32"),
        ("llama", "llama.rope.dimension_count", 64, "64 is not an even number from 2 to the head dimension 32"),
        ("llama", "llama.rope.scaling.type", "longrope", "longrope is not supported; supported: none, linear, yarn"),
        ("llama", "llama.rope.scaling.factor", -2.0, "-2.0 is not a positive number"),
        ("llama", "llama.expert_count", 8, "experts in the architecture llama are not supported"),
        ("llama", "tokenizer.ggml.tokens", ["a", "b"], "has 2 tokens, but token_embd.weight has 640 rows"),
        ("qwen3moe", "qwen3moe.expert_used_count", 9, "9 of 8 experts cannot be used"),
        ("qwen3moe", "qwen3moe.expert_gating_func", 2, "only softmax gating is supported"),
        ("qwen3moe", "qwen3moe.expert_weights_scale", 2.5, "scaled expert weights are not supported"),
        ("qwen3moe", "qwen3moe.expert_feed_forward_length", None, "this metadata key is missing"),
    ],
)
def test_metadata_that_cannot_be_are_refused_by_key(
    tmp_path: Path, architecture: str, key: str, value: Any, message: str
) -> None:
    changed = draft(architecture)
    changed.metadata.pop(key, None)
    if value is not None:
        changed.metadata[key] = value
    with pytest.raises(ModelFileError, match=rf"{key}: {message}") as caught:
        read(changed, tmp_path)
    assert caught.value.field == key


def test_heads_must_share_out_the_hidden_size_when_no_key_length_is_given(tmp_path: Path) -> None:
    changed = draft("qwen2")
    changed.metadata["qwen2.attention.head_count"] = 7
    changed.metadata["qwen2.attention.head_count_kv"] = 7
    with pytest.raises(ModelFileError, match=r"qwen2\.attention\.head_count: 7 heads do not divide"):
        read(changed, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "name", "tensor", "message"),
    [
        ("llama", "token_embd.weight", None, "this tensor is missing"),
        ("llama", "blk.1.attn_k.weight", None, "this tensor is missing"),
        ("llama", "blk.1.ffn_up.weight", Tensor((128, 128), data=bytes(4 * 128 * 128)), r"has shape \[128, 128\], the"),
        ("llama", "blk.0.attn_output.bias", Tensor((128,), data=bytes(512)), "is not part of the llama model"),
        ("qwen2", "blk.0.attn_v.bias", None, "this tensor is missing"),
        ("qwen3", "blk.0.attn_q_norm.weight", None, "this tensor is missing"),
        ("qwen3", "blk.3.attn_norm.weight", Tensor((128,), data=bytes(512)), "is not part of the qwen3 model"),
        ("qwen3moe", "blk.0.ffn_gate_inp.weight", None, "this tensor is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, architecture: str, name: str, tensor: Tensor | None, message: str
) -> None:
    changed = draft(architecture)
    changed.tensors.pop(name, None)
    if tensor is not None:
        changed.tensors[name] = tensor
    with pytest.raises(ModelFileError, match=rf"{name}: .*{message}|{name}: {message}"):
        read(changed, tmp_path)


def test_more_layers_than_tensors_are_found_at_once(tmp_path: Path) -> None:
    changed = draft("llama")
    changed.metadata["llama.block_count"] = 2**32 - 1
    with pytest.raises(ModelFileError, match=r"blk\.\d\.attn_norm\.weight: this tensor is missing"):
        read(changed, tmp_path)


def test_optional_parts_of_llama_are_found_by_their_tensors(tmp_path: Path) -> None:
    changed = draft("llama")
    plain = read(changed, tmp_path)
    assert not plain.qkv_bias
    assert plain.tied_embeddings
    for layer in range(plain.n_layers):
        for part, rows in (("q", plain.hidden), ("k", 64), ("v", 64)):
            changed.tensors[f"blk.{layer}.attn_{part}.bias"] = Tensor((rows,), data=bytes(4 * rows))
    changed.tensors["output.weight"] = Tensor((640, plain.hidden), QuantType.F16, bytes(2 * 640 * plain.hidden))
    changed.tensors["rope_freqs.weight"] = Tensor((16,), data=bytes(64))
    full = read(changed, tmp_path)
    assert full.qkv_bias
    assert not full.tied_embeddings
    assert full.rope.frequency_factors


@pytest.mark.parametrize(
    ("keys", "scaling", "factor"),
    [
        ({}, "none", 1.0),
        ({"scaling.factor": 4.0}, "linear", 4.0),
        ({"scale_linear": 2.0}, "linear", 2.0),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, "linear", 4.0),
        ({"scaling.type": "linear", "scaling.factor": 1.0}, "none", 1.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, "none", 1.0),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, "yarn", 4.0),
    ],
)
def test_rope_scaling(tmp_path: Path, keys: dict[str, Any], scaling: str, factor: float) -> None:
    changed = draft("qwen3")
    changed.metadata |= {f"qwen3.rope.{key}": value for key, value in keys.items()}
    rope = read(changed, tmp_path).rope
    assert (rope.scaling, rope.factor) == (scaling, factor)


def test_yarn_numbers(tmp_path: Path) -> None:
    changed = draft("qwen3")
    changed.metadata |= {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0}
    rope = read(changed, tmp_path).rope
    assert (rope.original_context, rope.attention_factor, rope.beta_fast, rope.beta_slow) == (1024, 1.0, 32.0, 1.0)
    changed.metadata |= {
        "qwen3.rope.scaling.original_context_length": 256,
        "qwen3.rope.scaling.attn_factor": 0.5,
        "qwen3.rope.scaling.yarn_attn_factor": 3.0,
        "qwen3.rope.scaling.yarn_beta_fast": 16.0,
        "qwen3.rope.scaling.yarn_beta_slow": 2.0,
    }
    rope = read(changed, tmp_path).rope
    assert (rope.original_context, rope.attention_factor, rope.beta_fast, rope.beta_slow) == (256, 1.5, 16.0, 2.0)
    changed.metadata["qwen3.rope.scaling.yarn_ext_factor"] = 0.5
    with pytest.raises(ModelFileError, match=r"yarn_ext_factor: 0\.5 is not supported"):
        read(changed, tmp_path)


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    changed = draft("llama")
    changed.metadata["llama.attention.sliding_window"] = 200
    assert read(changed, tmp_path).trained_context == 200
