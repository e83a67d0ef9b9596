"""What a plan charges for scratch is what a stage makes, to the byte."""

import pytest

from engine.gguf import open_gguf
from engine.model.config import ModelConfig
from engine.plan.demand import demand
from engine.plan.scratch import nbytes, stage_buffers, stage_rows
from tests.golden.cases import COMMITTED


@pytest.mark.parametrize("name", ["llama-Q4_1-s1", "qwen3moe-k-Q5_K-s1"])
@pytest.mark.parametrize("chunk", [1, 64, 65, 512])
def test_the_plan_charges_what_is_made(name, chunk):
    gguf = open_gguf(str(COMMITTED / f"models/{name}/model.gguf"))
    model = ModelConfig.from_gguf(gguf)
    sizes = {name: info.nbytes for name, info in gguf.tensors.items()}
    needs = demand(model, sizes, max_batch=8)
    fixed = stage_rows(chunk) * needs.row_scratch + needs.stage_scratch
    for last in (False, True):
        made = stage_buffers(model, chunk=chunk, batch=8, context=model.trained_context, last=last)
        assert nbytes(made) == fixed + last * needs.logit_scratch
        assert len({buffer.name for buffer in made}) == len(made)
