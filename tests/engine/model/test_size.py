from dataclasses import replace

import numpy as np
import pytest

from engine.gguf import open_gguf
from engine.gguf.quants import QuantType
from engine.kv_cache.storage import allocate_kv
from engine.model.config import ModelConfig
from engine.model.size import Layout, kv_block_bytes, layout, weights_bytes
from engine.ops.backend import Rope
from engine.ops.cpu.linear import Matrix
from tests.golden.cases import golden_cases
from tests.golden.running import load


def test_layouts():
    assert layout([QuantType.Q4_0]) == Layout(32, False)
    assert layout([QuantType.Q4_K, QuantType.Q4_K]) == Layout(32, True)
    assert layout([QuantType.Q4_K, QuantType.Q6_K]) == Layout(16, True)
    assert layout([QuantType.Q8_0, QuantType.F16]) == Layout(0, False)
    assert Layout(32, True).nbytes(64) == 64 + 2 * 2 * 4
    assert Layout(16, False).nbytes(64) == 64 + 4 * 4
    assert Layout(0, False).nbytes(64) == 256


def arrays(part: object) -> dict[int, int]:
    """Bytes of every array within a decoder, by identity: tied embeddings are counted once."""
    if isinstance(part, np.ndarray):
        return {id(part): part.nbytes}
    if isinstance(part, Matrix) and not part.offset_step:
        part = replace(part, offsets=np.empty(0, np.float32))
    if isinstance(part, Rope):
        return {}
    if isinstance(part, tuple):
        parts = list(part)
    else:
        parts = [getattr(part, name) for name in getattr(part, "__dataclass_fields__", ())]
    return {key: size for item in parts for key, size in arrays(item).items()}


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case.name)
def test_weights_take_what_was_foretold(case):
    gguf = open_gguf(str(case.model))
    pipeline = load(str(case.model), "f32", 1)
    assert sum(arrays(pipeline.decoder).values()) == weights_bytes(gguf, ModelConfig.from_gguf(gguf))


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8"])
def test_blocks_take_what_was_foretold(dtype):
    config = ModelConfig.from_gguf(open_gguf(str(golden_cases(["llama"])[0].model)))
    kv = allocate_kv(dtype, config.n_layers, 3, config.n_kv_heads, config.head_dim)
    assert kv.data.nbytes + kv.scales.nbytes == 3 * kv_block_bytes(config, dtype)
