"""The buffers of one step, which hold nothing from one step to the next."""

from engine.model.config import ModelConfig

_F32 = 4


def row_elements(model: ModelConfig) -> int:
    """Upper bound of the elements that one token has in all buffers of a layer at once."""
    heads = (2 * model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    feed_forward = 3 * max(model.ffn, model.experts_used * model.expert_ffn)
    return 6 * model.hidden + heads + feed_forward + model.experts


def logit_elements(model: ModelConfig, batch: int) -> int:
    """Logits of `batch` sampled tokens, and room to sort one row of them."""
    return batch * model.vocab + 4 * model.vocab


def scratch_bytes(model: ModelConfig, *, rows: int, batch: int) -> int:
    """Upper bound of the buffers of one step over `rows` tokens, `batch` of them sampled; float32 throughout."""
    return _F32 * (rows * row_elements(model) + logit_elements(model, batch))
