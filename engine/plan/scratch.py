"""The buffers of one step, which hold nothing from one step to the next: what a plan charges and what a stage makes."""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from engine.config import BLOCK_TOKENS
from engine.model.config import ModelConfig

GROUP_ROWS = 64
"""Rows of one decode forward; a step of more sequences is several."""
PROMPT_TAIL_ROWS = 256
"""The last of a prompt, up to so many tokens, is captured too."""
ROW_MULTIPLE = 64
"""Rows of a stage's buffers are a multiple of this: then what a row takes is the same for every number of rows."""
COLUMN_MULTIPLE = 256
"""Columns that a product reads are padded to whole records of every format, with zeros."""
ATTENTION_RUNS = 64
"""Parts into which one row's context is cut at most in decode attention."""
SAMPLE_SLICE = 4096
"""Logits of one block of the sampler."""
MOST_BIAS, MOST_TOP = 512, 20
"""Logit biases and top log probabilities of one sequence, at most."""
SLOT_BYTES = 64
"""Settings of one sequence, as the sampler reads them."""
ITEM_ROWS = 8
"""Rows of the smallest work item of a product grouped by expert."""
GATE_COLUMNS = 4096
"""Columns of a product that is only on its way to `swiglu`: it is made in as many turns as that takes."""

_ALIGNMENT = 256
_ITEM_SIZES = {"float32": 4, "float16": 2, "int32": 4, "uint16": 2, "uint8": 1}


class Buffer(NamedTuple):
    """`dtype` by NumPy's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """With the padding to the next buffer."""
        return aligned(prod(self.shape) * _ITEM_SIZES[self.dtype])


ITEM_COUNT = Buffer("item_count", (1,), "int32")


def aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def nbytes(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def padded(columns: int) -> int:
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def stage_rows(chunk: int) -> int:
    """Rows of the largest forward of a stage whose largest chunk has so many tokens."""
    return -(-max(chunk, PROMPT_TAIL_ROWS) // ROW_MULTIPLE) * ROW_MULTIPLE


def row_buffers(model: ModelConfig, rows: int) -> list[Buffer]:
    """What grows with the rows of a forward, on every stage. The stream and products are float32, what products read
    is float16."""
    attended = model.n_heads * model.head_dim
    fused = attended + 2 * model.n_kv_heads * model.head_dim
    gate_up = 2 * max(model.ffn, model.experts_used * model.expert_ffn)
    buffers = [
        Buffer("inputs", (4, rows), "int32"),
        Buffer("x", (rows, model.hidden), "float32"),
        Buffer("h", (rows, padded(model.hidden)), "float16"),
        Buffer("product", (rows, max(fused, model.experts, min(gate_up, GATE_COLUMNS))), "float32"),
        Buffer("q", (rows, attended), "float16"),
        Buffer("mixed", (rows, padded(attended)), "float16"),
    ]
    if not model.experts:
        return [*buffers, Buffer("inner", (rows, padded(model.ffn)), "float16")]
    pairs = rows * model.experts_used
    return [
        *buffers,
        Buffer("inner", (pairs, padded(model.expert_ffn)), "float16"),
        Buffer("parts", (pairs, model.hidden), "float32"),
        *route_buffers(pairs),
    ]


def route_buffers(pairs: int) -> list[Buffer]:
    """For so many pairs of a row and an expert; beside them `item_count`, which all numbers of rows share."""
    names = "chosen", "tokens", "pairs"
    return [
        *(Buffer(name, (pairs,), "int32") for name in names),
        Buffer("shares", (pairs,), "float32"),
        Buffer("items", (pairs, 4), "int32"),
    ]


def fixed_buffers(model: ModelConfig, *, batch: int, context: int) -> list[Buffer]:
    """What every stage has beside, for `batch` sequences of up to `context` tokens."""
    return [
        Buffer("tables", (batch, -(-context // BLOCK_TOKENS)), "int32"),
        Buffer("last_tokens", (batch,), "int32"),
        *attention_buffers(GROUP_ROWS, model.n_heads, model.head_dim),
        *([ITEM_COUNT] if model.experts else []),
    ]


def attention_buffers(rows: int, heads: int, dim: int) -> list[Buffer]:
    """The parts of a decode launch, each with its greatest score and its sum."""
    parts = rows, ATTENTION_RUNS, heads
    return [
        Buffer("attention_parts", (*parts, dim), "float32"),
        Buffer("attention_sums", (*parts, 2), "float32"),
    ]


def sample_rows(batch: int) -> int:
    """Rows of the largest sample, of one decode forward."""
    return 1 << (min(batch, GROUP_ROWS) - 1).bit_length()


def sample_buffers(model: ModelConfig, *, batch: int) -> list[Buffer]:
    """What the last stage has beside: from the stream to tokens."""
    rows = sample_rows(batch)
    return [
        Buffer("sample_inputs", (3, rows), "int32"),
        Buffer("sampled", (rows, padded(model.hidden)), "float16"),
        Buffer("logits", (rows, model.vocab), "float32"),
        *sampler_buffers(model.vocab, slots=batch, rows=rows),
    ]


def sampler_buffers(vocab: int, *, slots: int, rows: int) -> list[Buffer]:
    """State of `slots` sequences, and room to draw `rows` tokens at a time."""
    slices = -(-vocab // SAMPLE_SLICE)
    return [
        Buffer("adjusted", (rows, vocab), "float32"),
        Buffer("slices", (rows, slices, 4), "float32"),
        Buffer("scores", (rows, slices, 2), "float32"),
        Buffer("slots", (slots, SLOT_BYTES), "uint8"),
        Buffer("counts", (slots, vocab), "uint16"),
        Buffer("bias_tokens", (slots, MOST_BIAS), "int32"),
        Buffer("bias_values", (slots, MOST_BIAS), "float32"),
        Buffer("drawn", (rows * (2 + 2 * MOST_TOP),), "int32"),
    ]


def stage_buffers(model: ModelConfig, *, chunk: int, batch: int, context: int, last: bool) -> list[Buffer]:
    """All buffers of a stage. Exactly `stage_rows(chunk)` times what a row takes, and what is fixed."""
    return [
        *row_buffers(model, stage_rows(chunk)),
        *fixed_buffers(model, batch=batch, context=context),
        *(sample_buffers(model, batch=batch) if last else []),
    ]


def host_scratch_bytes(model: ModelConfig, *, rows: int, batch: int) -> int:
    """Upper bound of the CPU's buffers of one step over `rows` tokens, `batch` of them sampled; float32 throughout."""
    heads = (2 * model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    feed_forward = 3 * max(model.ffn, model.experts_used * model.expert_ffn)
    row = 6 * model.hidden + heads + feed_forward + model.experts
    return 4 * (rows * row + (batch + 4) * model.vocab)
