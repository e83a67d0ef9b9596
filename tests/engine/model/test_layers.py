"""The networks run on the twin as on the kernels, on every architecture: only the backend differs."""

import numpy as np
import pytest

from engine.gguf import open_gguf
from engine.kv_cache.storage import allocate_kv
from engine.model.config import SUPPORTED_ARCHITECTURES, ModelConfig
from engine.model.registry import ARCHITECTURES, build
from engine.ops.reference import ReferenceOps, ReferenceWeights
from engine.ops.rows import Rows, Span
from tests.golden.cases import golden_cases
from tests.golden.running import load

ONE_OF_EACH = ("llama3-rope-F16-s1", "llama-k-Q4_K-s1", "qwen2-F32-s4", "qwen3-Q8_0-s5", "qwen3moe-8x2-Q4_0-s1")
CASES = [case for case in golden_cases() if case.name in ONE_OF_EACH]


def test_every_supported_architecture_is_built():
    assert set(ARCHITECTURES) == set(SUPPORTED_ARCHITECTURES)
    assert len(CASES) == len(ONE_OF_EACH)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_twin_and_kernels_agree(case, kv_dtype):
    gguf = open_gguf(str(case.model))
    config = ModelConfig.from_gguf(gguf)
    decoder = build(config, ReferenceWeights(gguf))
    twin = ReferenceOps(allocate_kv(kv_dtype, config.n_layers, 6, config.n_kv_heads, config.head_dim))
    pipeline = load(str(case.model), kv_dtype, 6)
    steps = [
        [Span(range(100, 180), 0, [3, 1]), Span(range(5), 0, [0])],
        [Span([7], 80, [3, 1]), Span([9], 5, [0]), Span(range(30), 0, [5])],
    ]
    for spans in steps:
        rows, places = Rows.of(spans), np.arange(sum(len(span.tokens) for span in spans))
        expected = decoder.logits(twin, decoder.hidden(twin, rows), places)
        ours = pipeline.decoder.logits(pipeline.ops, pipeline.decoder.hidden(pipeline.ops, rows), places)
        # Half precision keys may round the other way after a difference in the last place.
        np.testing.assert_allclose(ours, expected, atol=2e-4 if kv_dtype == "f32" else 2e-2)
