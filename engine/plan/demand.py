"""What a model asks of the cards it is spread over, in bytes and by layer; nothing after this looks at the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from engine.gguf import GgufFile
from engine.model.config import ModelConfig
from engine.plan.costs import COSTS, Costs
from engine.plan.scratch import ROW_MULTIPLE, fixed_buffers, nbytes, row_buffers, sample_buffers

_EMBEDDING = "token_embd.weight"
_F16 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Weights are as stored on the device, with the padding between tensors."""

    layer_weights: tuple[int, ...]
    embedding: int
    """On the first stage."""
    head: int
    """On the last stage, whether or not that is the first too."""
    head_shared: int = 0
    """On the last stage unless that is the first: the head is the embedding matrix, which is there already."""
    every_stage: int = 0
    layer_shadow: tuple[int, ...] = ()
    """An f16 copy of each layer's dense matrices; empty where there is none to make."""
    kv_heads: int
    head_dim: int
    trained_context: int
    row_scratch: int
    """Per row of the largest forward."""
    stage_scratch: int = 0
    """Beside that on every stage, with the largest batch and context."""
    logit_scratch: int
    """Beside that on the last stage."""

    @property
    def n_layers(self) -> int:
        return len(self.layer_weights)


def demand(model: ModelConfig, tensor_bytes: Mapping[str, int], *, max_batch: int, costs: Costs = COSTS) -> Demand:
    """`tensor_bytes` has the size on the device of every tensor of `model.tensor_shapes()`; GGUF's own for CUDA."""
    layers = [0] * model.n_layers
    shadows = [0] * model.n_layers
    rest: dict[str, int] = {}
    for name, shape in model.tensor_shapes():
        size = costs.aligned(tensor_bytes[name])
        if not name.startswith("blk."):
            rest[name] = size
            continue
        layer = int(name.split(".")[1])
        layers[layer] += size
        if len(shape) == 2 and not name.endswith("ffn_gate_inp.weight"):
            shadows[layer] += costs.aligned(prod(shape) * _F16)
    embedding, head = rest.pop(_EMBEDDING), rest.pop("output.weight", 0)
    norm = rest.pop("output_norm.weight")
    return Demand(
        layer_weights=tuple(layers),
        embedding=embedding,
        head=norm + head,
        head_shared=embedding if model.tied_embeddings else 0,
        every_stage=sum(rest.values()),
        layer_shadow=tuple(shadows),
        kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        trained_context=model.trained_context,
        row_scratch=nbytes(row_buffers(model, ROW_MULTIPLE)) // ROW_MULTIPLE,
        stage_scratch=nbytes(fixed_buffers(model, batch=max_batch, context=model.trained_context)),
        logit_scratch=nbytes(sample_buffers(model, batch=max_batch)),
    )


def file_demand(gguf: GgufFile, *, max_batch: int, costs: Costs = COSTS) -> Demand:
    """Of a file whose tensors are stored on the device as they are in it. Raises ModelFileError."""
    sizes = {name: info.nbytes for name, info in gguf.tensors.items()}
    return demand(ModelConfig.from_gguf(gguf), sizes, max_batch=max_batch, costs=costs)
