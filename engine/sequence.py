"""One sequence inside the engine, and the plan of one step over many of them."""

from dataclasses import dataclass, field

from engine.messages import Submit


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request choice; the scheduler writes it, the kinds of state keep `blocks` and what follows."""

    submit: Submit
    max_known: int
    """Prompt and generated tokens together at which it ends with "length"."""
    generated: list[int] = field(default_factory=list)
    slot: int = -1
    """Row in the pipeline's per-sequence arrays; -1 while it holds neither slot nor state."""
    computed: int = 0
    """Tokens whose state is stored or will be stored by a launched step."""
    stored: int = 0
    """Tokens whose state is stored by a collected step."""
    launched: int = 0
    """Generated tokens including those that a launched step will sample."""
    last_step: int = -1
    """Last launched step that names its slot or blocks."""
    reading: bool = False
    """Running, and known tokens are still to be computed in chunks."""
    ended: bool = False
    blocks: list[int] = field(default_factory=list)
    cached_blocks: int = 0
    """How many of `blocks`, from the first on, are in the prefix cache's hands and must not be written."""
    keys: list[bytes] = field(default_factory=list)
    """Hash chain over the full blocks of the known tokens, as far as it was asked for."""

    @property
    def known(self) -> int:
        """Tokens whose ids are known: the prompt's and the generated ones."""
        return len(self.submit.prompt_ids) + len(self.generated)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens from `start` to before `stop`, the generated ones following on the prompt's."""
        prompt = self.submit.prompt_ids
        after = len(prompt)
        return prompt[start:stop] + self.generated[max(start - after, 0) : max(stop - after, 0)]


@dataclass(slots=True, frozen=True)
class DecodeRow:
    """One token of one sequence: its id is the pipeline's `last token` of `slot`, stored at `position`.

    `blocks` is the sequence's own list: it may be longer than this row needs, and grows, at its end, while in flight.
    """

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
    """(slot, one line) of rows that yielded no token, as when logits are not finite: their sequences fail alone."""
