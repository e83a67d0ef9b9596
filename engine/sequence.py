"""One sequence inside the engine, and the plan of one step over many of them."""

from dataclasses import dataclass, field

from engine.messages import Submit


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request choice. `slot` is its row in the pipeline's per-sequence arrays while it runs."""

    submit: Submit
    generated: list[int] = field(default_factory=list)
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is stored or will be stored by a launched step."""
    launched: int = 0
    """Generated tokens including those that a launched step will sample."""
    cancelled: bool = False


@dataclass(slots=True, frozen=True)
class DecodeRow:
    """One token of one sequence: its id is the pipeline's `last token` of `slot`, stored at `position`."""

    slot: int
    position: int
    blocks: list[int]
    generated_index: int
    """Index of the token that this row's sample will yield; part of the noise counter."""


@dataclass(slots=True, frozen=True)
class PrefillChunk:
    """Consecutive known tokens of one sequence, from position `start` on; the last chunk is sampled."""

    slot: int
    tokens: list[int]
    start: int
    blocks: list[int]
    completes: bool
    generated_index: int


@dataclass(slots=True, frozen=True)
class StepPlan:
    """What one step computes: all decode rows, then at most one prefill chunk."""

    step: int
    decode: list[DecodeRow]
    prefill: PrefillChunk | None


@dataclass(slots=True, frozen=True)
class Sampled:
    """What a step made of one row, in the order of the plan (decode rows, then a completed prefill)."""

    slot: int
    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


@dataclass(slots=True, frozen=True)
class StepResult:
    step: int
    sampled: list[Sampled]
    failed: tuple[tuple[int, str], ...] = ()
    """(slot, one line) of rows that yielded no token, such as logits that are not finite: their sequences fail alone."""
