"""A pipeline without a model whose tokens prove what state they were computed from.

Each token's entry in the KV storage is a digest of the whole text up to it, made from the entry before it as found in
the blocks that the plan names. The token sampled from a row is a function of the entries of *all* its positions, as
attention would read them: a wrong block table, a block with two writers or a stale prefix hit changes the output, and
`expected_tokens` is the output of undisturbed text.
"""

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.messages import Sampling, Submit
from engine.pipeline import Pipeline
from engine.sequence import DecodeRow, PrefillChunk, Sampled, StepPlan, StepResult

VOCAB = 50
BAD_TOKEN = 49
"""A prompt with this token is refused at admission."""
BAD_ROW = 48
"""A prompt that ends with this token yields no first token."""


def digest(*parts) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def entries_of(tokens):
    """What the storage must hold for a text."""
    entries, last = [], 0
    for position, token in enumerate(tokens):
        last = digest(last, position, token)
        entries.append(last)
    return entries


def next_token(entries, sampling: Sampling, index: int, counted: int) -> int:
    return digest(sum(entries), entries[-1], sampling.seed, sampling.choice, index, counted) % (VOCAB - 2)


def expected_tokens(submit: Submit, max_context: int = 10**9) -> tuple[list[int], str]:
    """All generated tokens of an undisturbed run, those in `generated_ids` included, and how it ends."""
    generated = list(submit.generated_ids)
    limit = min(submit.max_tokens, max_context - len(submit.prompt_ids))
    entries = entries_of(submit.prompt_ids + generated)
    while True:
        generated.append(next_token(entries, submit.sampling, len(generated), len(generated)))
        if generated[-1] in submit.stop_ids:
            return generated, "stop"
        if len(generated) >= limit:
            return generated, "length"
        entries.append(digest(entries[-1], len(entries), generated[-1]))


@dataclass
class Slot:
    sampling: Sampling
    counted: int
    """Output tokens that the sampler's state knows of."""
    last_token: int = -1


@dataclass
class ScriptedPipeline(Pipeline):
    """`eager` computes at launch, as a quick device would, and ignores drops; else at collect, as the CPU does."""

    block_tokens: int
    eager: bool = False
    storage: dict[tuple[int, int], int] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)
    queue: deque = field(default_factory=deque)
    dropped: set[tuple[int, int]] = field(default_factory=set)
    """(step, slot) of rows left out."""
    computed_rows: int = 0

    def admit(self, slot, submit, generated):
        if BAD_TOKEN in submit.prompt_ids:
            raise ValueError(f"token {BAD_TOKEN} is not in the vocabulary")
        self.slots[slot] = Slot(submit.sampling, len(generated))

    def launch(self, plan: StepPlan):
        assert self.in_flight < 2
        self.check(plan)
        self.queue.append(self.compute(plan) if self.eager else plan)

    def collect(self):
        first = self.queue.popleft()
        return first if self.eager else self.compute(first)

    def drop(self, slot):
        for plan in () if self.eager else self.queue:
            self.dropped.add((plan.step, slot))

    @property
    def in_flight(self):
        return len(self.queue)

    def check(self, plan):
        """No two rows of a step write the same block."""
        written = [row.blocks[row.position // self.block_tokens] for row in plan.decode]
        if plan.prefill is not None:
            start, stop = plan.prefill.start, plan.prefill.start + len(plan.prefill.tokens)
            written += plan.prefill.blocks[start // self.block_tokens : -(-stop // self.block_tokens)]
        assert len(set(written)) == len(written)
        assert len({row.slot for row in plan.decode}) == len(plan.decode)

    def compute(self, plan) -> StepResult:
        sampled, failed = [], []
        for row in plan.decode:
            if (plan.step, row.slot) not in self.dropped:
                sampled.append(self.decode(row))
        chunk = plan.prefill
        if chunk is not None and (plan.step, chunk.slot) not in self.dropped:
            self.store(chunk.slot, chunk.blocks, chunk.start, chunk.tokens)
            if chunk.completes and chunk.tokens[-1] == BAD_ROW:
                failed.append((chunk.slot, "logits are not finite"))
            elif chunk.completes:
                sampled.append(self.sample(chunk, chunk.start + len(chunk.tokens)))
        return StepResult(plan.step, sampled, tuple(failed))

    def decode(self, row: DecodeRow) -> Sampled:
        self.store(row.slot, row.blocks, row.position, [self.slots[row.slot].last_token])
        return self.sample(row, row.position + 1)

    def store(self, slot, blocks, start, tokens):
        for position, token in enumerate(tokens, start):
            before = self.entry(blocks, position - 1) if position else 0
            block, offset = divmod(position, self.block_tokens)
            self.storage[blocks[block], offset] = digest(before, position, token)
            self.computed_rows += 1

    def entry(self, blocks, position) -> int:
        block, offset = divmod(position, self.block_tokens)
        return self.storage[blocks[block], offset]

    def sample(self, row: DecodeRow | PrefillChunk, length: int) -> Sampled:
        slot = self.slots[row.slot]
        entries = [self.entry(row.blocks, position) for position in range(length)]
        slot.last_token = next_token(entries, slot.sampling, row.generated_index, slot.counted)
        slot.counted += 1
        logprob = -1.0 if slot.sampling.logprobs is not None else None
        return Sampled(row.slot, slot.last_token, logprob)


def submit(sequence, prompt, generated=(), max_tokens=10, stop_ids=(), **rest) -> Submit:
    sampling = Sampling(seed=rest.pop("seed", 0))
    return Submit(sequence, list(prompt), list(generated), sampling, max_tokens, tuple(stop_ids), **rest)
