from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, DoesNotFit
from engine.gguf import open_gguf
from engine.model.config import ModelConfig
from engine.ops.cpu.pipeline import SLICE_ROWS
from engine.plan import CPU_SLICE_ROWS, CpuPlan, plan_cpu
from engine.plan.scratch import host_scratch_bytes
from tests.golden.cases import COMMITTED

MIB = 1 << 20
BLOCK = 3 * MIB
WEIGHTS = 100 * MIB


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    config = ModelConfig.from_gguf(open_gguf(str(COMMITTED / "models/llama-Q4_1-s1/model.gguf")))
    return replace(config, trained_context=8192)


def plan(model: ModelConfig, available_mib: int, block: int = BLOCK, **settings: Any) -> CpuPlan:
    config = EngineConfig(model_path="/models/x.gguf", **settings)
    return plan_cpu(config, model, weight_bytes=WEIGHTS, block_bytes=block, available_bytes=available_mib * MIB)


def test_plenty_of_memory_buys_the_trained_context_64_times(model: ModelConfig) -> None:
    made = plan(model, 10**6)
    assert made.max_context == 8192
    assert made.kv_blocks == 64 * 8192 // 64
    assert made.kv_bytes == made.kv_blocks * BLOCK
    assert made.weight_bytes == WEIGHTS


def test_the_pool_is_a_quarter_of_what_is_available(model: ModelConfig) -> None:
    made = plan(model, 12_000)
    assert made.kv_blocks == 1000
    assert made.max_context == 8192


def test_the_context_is_what_fits(model: ModelConfig) -> None:
    made = plan(model, 1200)
    assert made.kv_blocks == 100
    assert made.max_context == 6400


def test_a_context_that_was_asked_for_may_take_more_than_a_quarter(model: ModelConfig) -> None:
    made = plan(model, 1200, max_context=8001)
    assert made.max_context == 8001
    assert made.kv_blocks == 126


def test_a_small_context_needs_a_small_pool(model: ModelConfig) -> None:
    assert plan(model, 10**6, max_context=100).kv_blocks == 64 * 2


def test_the_pool_that_was_asked_for(model: ModelConfig) -> None:
    made = plan(model, 12_000, kv_pool_mib=7000)
    assert made.kv_blocks == 2333
    assert made.max_context == 8192
    assert plan(model, 12_000, kv_pool_mib=31).max_context == 640


def test_scratch_grows_with_chunk_and_batch(model: ModelConfig) -> None:
    small = host_scratch_bytes(model, rows=64, batch=1)
    assert host_scratch_bytes(model, rows=4096, batch=1) > 32 * small / 2
    assert host_scratch_bytes(model, rows=64, batch=64) - small == 63 * model.vocab * 4


def test_the_slice_is_the_pipelines() -> None:
    assert CPU_SLICE_ROWS == SLICE_ROWS


@pytest.mark.parametrize(
    ("available", "settings", "error", "words"),
    [
        (10**6, {"max_context": 8193}, ConfigError, "llama.context_length: .* 8192 tokens, --max-context 8193"),
        (90, {}, DoesNotFit, "100 MiB for weights.* only 90 MiB .* take a smaller model"),
        (300, {"max_context": 8192}, DoesNotFit, r"384 MiB for keys.* 300 MiB .*--max-context \d+ would fit"),
        (10**6, {"kv_pool_mib": 2}, DoesNotFit, "--kv-pool-mib 2 does not hold .* 64 tokens.* 3 MiB"),
        (10**6, {"kv_pool_mib": 100, "max_context": 8192}, DoesNotFit, "8192 tokens, which takes 384 MiB"),
        (1000, {"kv_pool_mib": 2000}, DoesNotFit, r"only 1000 MiB .*--kv-pool-mib \d+ would fit"),
    ],
)
def test_refusals_say_all_figures_in_one_line(
    model: ModelConfig, available: int, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        plan(model, available, **settings)
    assert str(caught.value).startswith("/models/x.gguf: ")
    assert "\n" not in str(caught.value)


def test_what_a_refusal_says_would_fit_does(model: ModelConfig) -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(model, 300, max_context=8192)
    context = int(str(caught.value).split("--max-context ")[1].split()[0])
    assert plan(model, 300, max_context=context).max_context == context
    with pytest.raises(DoesNotFit) as caught:
        plan(model, 1000, kv_pool_mib=2000)
    pool = int(str(caught.value).split("--kv-pool-mib ")[1].split()[0])
    assert plan(model, 1000, kv_pool_mib=pool).kv_bytes <= pool * MIB
