"""Every byte of a file's tensors is on exactly the stages that need it."""

import pytest

from engine.gguf import open_gguf
from engine.model.config import ModelConfig
from engine.plan.costs import Costs
from engine.plan.demand import demand
from tests.golden.cases import COMMITTED

EXACT = Costs(tensor_alignment=1)


def opened(name):
    gguf = open_gguf(str(COMMITTED / f"models/{name}/model.gguf"))
    return gguf, ModelConfig.from_gguf(gguf), {name: info.nbytes for name, info in gguf.tensors.items()}


@pytest.mark.parametrize("path", sorted((COMMITTED / "models").iterdir()), ids=lambda path: path.name)
def test_all_tensors_are_somewhere(path):
    _, model, sizes = opened(path.name)
    needs = demand(model, sizes, max_batch=8, costs=EXACT)
    on_one_stage = sum(needs.layer_weights) + needs.embedding + needs.head + needs.every_stage
    assert on_one_stage == sum(sizes.values())
    assert needs.n_layers == model.n_layers
    assert needs.head_shared == (sizes["token_embd.weight"] if "output.weight" not in sizes else 0)
    assert all(shadow > 0 for shadow in needs.layer_shadow)


def test_padding_counts_tensor_by_tensor():
    _, model, sizes = opened("llama-Q4_1-s1")
    exact = demand(model, sizes, max_batch=8, costs=EXACT)
    padded = demand(model, sizes, max_batch=8, costs=Costs(tensor_alignment=4096))
    layer = [size for name, size in sizes.items() if name.startswith("blk.0.")]
    assert exact.layer_weights[0] == sum(layer)
    assert padded.layer_weights[0] == sum(-(-size // 4096) * 4096 for size in layer)
