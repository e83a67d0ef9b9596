"""Settings of the rotary embedding, read from the GGUF metadata."""

from dataclasses import dataclass
from typing import Literal, Self

from engine.gguf import GgufFile

RopeScaling = Literal["none", "linear", "yarn"]
_SCALINGS: dict[str, RopeScaling] = {"none": "none", "linear": "linear", "yarn": "yarn"}
_INTERLEAVED = ("llama",)
FREQUENCY_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of the first `dims` elements of each head: frequency i is theta^(-2i / dims), i < dims / 2.

    `linear`: every frequency is divided by `factor`. `yarn` (arXiv:2309.00071): frequencies are divided by `factor`
    along a ramp between the dimensions that turn `beta_fast` and `beta_slow` times in `original_context`, and sine and
    cosine are multiplied by attention_factor * (1 + 0.1 ln factor). `frequency_factors`: before that, the tensor
    `rope_freqs.weight` [dims / 2] divides each frequency.
    """

    theta: float
    dims: int
    interleaved: bool
    """Pairs are neighbours (2i, 2i + 1), as llama files store Q and K; else halves (i, i + dims / 2)."""
    scaling: RopeScaling
    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    frequency_factors: bool

    @classmethod
    def from_gguf(cls, gguf: GgufFile, architecture: str, head_dim: int, context: int) -> Self:
        """Raises ModelFileError for a scaling that is not supported or a number that makes no frequency."""
        rope = f"{architecture}.rope."
        scaling, factor = _scaling(gguf, rope)
        extrapolation = gguf.f32(rope + "scaling.yarn_ext_factor", 1.0)
        if scaling == "yarn" and extrapolation != 1.0:
            gguf.fail(rope + "scaling.yarn_ext_factor", f"{extrapolation} is not supported; supported: 1.0")
        return cls(
            theta=_positive(gguf, rope + "freq_base", 10_000.0),
            dims=_dims(gguf, rope + "dimension_count", head_dim),
            interleaved=architecture in _INTERLEAVED,
            scaling=scaling,
            factor=factor,
            original_context=gguf.u32(rope + "scaling.original_context_length", 0) or context,
            attention_factor=_positive(gguf, rope + "scaling.attn_factor", 1.0)
            * _positive(gguf, rope + "scaling.yarn_attn_factor", 1.0),
            beta_fast=_positive(gguf, rope + "scaling.yarn_beta_fast", 32.0),
            beta_slow=_positive(gguf, rope + "scaling.yarn_beta_slow", 1.0),
            frequency_factors=architecture == "llama" and FREQUENCY_FACTORS in gguf.tensors,
        )


def _scaling(gguf: GgufFile, rope: str) -> tuple[RopeScaling, float]:
    """Files from before `scaling.type` have the factor alone, then called `scale_linear`."""
    factor = gguf.f32(rope + "scaling.factor", None)
    if factor is None:
        factor = gguf.f32(rope + "scale_linear", 0.0)
    kind = gguf.text(rope + "scaling.type", "linear" if factor else "none")
    if kind not in _SCALINGS:
        gguf.fail(rope + "scaling.type", f"{kind} is not supported; supported: {', '.join(_SCALINGS)}")
    if factor < 0:
        gguf.fail(rope + "scaling.factor", f"{factor} is not a positive number")
    stretched = kind != "none" and factor not in (0.0, 1.0)
    return (_SCALINGS[kind], factor) if stretched else ("none", 1.0)


def _dims(gguf: GgufFile, key: str, head_dim: int) -> int:
    dims = gguf.u32(key, head_dim)
    if dims % 2 or not 0 < dims <= head_dim:
        gguf.fail(key, f"{dims} is not an even number from 2 to the head dimension {head_dim}")
    return dims


def _positive(gguf: GgufFile, key: str, default: float) -> float:
    value = gguf.f32(key, default)
    if value <= 0:
        gguf.fail(key, f"{value} is not a positive number")
    return value
