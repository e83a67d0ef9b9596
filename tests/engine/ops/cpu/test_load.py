import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelFileError
from engine.gguf import open_gguf
from engine.model.config import ModelConfig
from engine.ops.cpu.load import CpuWeights, load_cpu
from tests.engine.ops.cpu.matrices import values
from tests.golden.cases import golden_cases

CASES = golden_cases()


def quiet(phase: str, done: int, total: int) -> None: ...


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stacked_matrices_hold_the_files_weights(case):
    gguf = open_gguf(str(case.model))
    with ThreadPoolExecutor(2) as pool:
        weights = CpuWeights(gguf, pool)
        names = ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight")
        stacks = [(weights.matrix(*names), names, 0)]
        if "blk.0.ffn_gate_exps.weight" in gguf.tensors:
            names = ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight")
            stacks.append((weights.gate_up(*names), names, 1))
        weights.finish(quiet)
    for matrix, names, axis in stacks:
        expected = np.concatenate([gguf.dequantised(name) for name in names], axis=axis)
        np.testing.assert_allclose(values(matrix).reshape(expected.shape), expected, rtol=1e-6, atol=1e-7)
        assert weights.widest >= matrix.shape[2]


def test_matrices_of_different_kinds_share_the_finest_layout():
    """A Q8_0 matrix (groups of 32, no offset) above an F16 one, and above itself with an offset in the other."""
    case = next(case for case in CASES if case.name == "llama-k-Q2_K-s1")
    gguf = open_gguf(str(case.model))
    with ThreadPoolExecutor(1) as pool:
        weights = CpuWeights(gguf, pool)
        names = [name for name, info in gguf.tensors.items() if len(info.shape) == 2 and info.shape[1] == 256]
        kinds = {gguf.tensor(name).quant: name for name in names}
        mixed = weights.matrix(*kinds.values())
        weights.finish(quiet)
    expected = np.concatenate([gguf.dequantised(name) for name in kinds.values()])
    np.testing.assert_allclose(values(mixed)[0], expected, rtol=1e-6, atol=1e-7)


def test_progress_reaches_the_end():
    seen = []
    gguf = open_gguf(str(CASES[0].model))
    config = EngineConfig(model_path=str(CASES[0].model))
    load_cpu(gguf, ModelConfig.from_gguf(gguf), config, 1, lambda *report: seen.append(report))
    phases = [phase for phase, _, _ in seen]
    assert phases == sorted(phases, key=["weights", "kernels"].index)
    for phase in ("weights", "kernels"):
        done = [(done, total) for name, done, total in seen if name == phase]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1] > 0


def test_a_damaged_tensor_is_named(tmp_path):
    case = next(case for case in CASES if case.name == "qwen3-Q8_0-s5")
    damaged = tmp_path / "model.gguf"
    shutil.copyfile(case.model, damaged)
    info = open_gguf(str(damaged)).tensor("blk.1.ffn_up.weight")
    with damaged.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xff\xff")
    gguf = open_gguf(str(damaged))
    with pytest.raises(ModelFileError, match=r"model.gguf: blk.1.ffn_up.weight: holds NaN or infinity"):
        load_cpu(gguf, ModelConfig.from_gguf(gguf), EngineConfig(model_path=str(damaged)), 1, quiet)


def test_threads_that_are_not_there():
    gguf = open_gguf(str(CASES[0].model))
    config = EngineConfig(model_path=str(CASES[0].model), threads=10_000)
    with pytest.raises(ConfigError, match="threads: 10000 wanted"):
        load_cpu(gguf, ModelConfig.from_gguf(gguf), config, 1, quiet)
