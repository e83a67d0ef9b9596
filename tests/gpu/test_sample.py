"""sample.cu against engine/sampling.py, its oracle. f32 scores against f64: a rare tie may fall the other way."""

from typing import Any

import cupy as cp
import numpy as np
import pytest

from engine.messages import Sampling
from engine.ops.cuda.room import Room
from engine.ops.cuda.sample import Drawn, Sampler
from engine.plan.scratch import sampler_buffers
from engine.sampling import SamplerState, sample

SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "greedy, logprobs": Sampling(temperature=0.0, logprobs=20),
    "plain": Sampling(seed=1 << 40 | 7, choice=2, logprobs=3),
    "hot": Sampling(temperature=3.0, seed=5),
    "cold": Sampling(temperature=0.05, seed=5, logprobs=0),
    "top_k": Sampling(top_k=40, seed=2),
    "top_k 1": Sampling(top_k=1, seed=2),
    "top_k beyond": Sampling(top_k=10**6, seed=2),
    "top_p": Sampling(top_p=0.9, seed=3),
    "top_p tiny": Sampling(top_p=1e-6, seed=3),
    "min_p": Sampling(min_p=0.05, seed=4),
    "all": Sampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, seed=9, logprobs=5),
    "penalties": Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, seed=6),
    "bias": Sampling(temperature=0.0, logit_bias=((3, 50.0), (17, -100.0))),
    "bias, penalties": Sampling(top_p=0.8, repetition_penalty=0.8, logit_bias=((3, 9.0), (5, 8.5)), seed=8, logprobs=1),
}
PROMPT, GENERATED = [3, 5, 5, 9, 100], [5, 9, 9, 9, 31]


def made(kernels: Any, slots: int, vocab: int) -> tuple[Sampler, Drawn]:
    room = Room.allocate(sampler_buffers(vocab, slots=slots, rows=slots))
    sampler = Sampler(kernels, room, cp.zeros(slots, cp.int32))
    return sampler, sampler.drawn


@pytest.mark.parametrize("vocab", [640, 49152, 151936])
def test_against_the_oracle(kernels: Any, stream: Any, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    settings = list(SETTINGS.values())
    slots = len(settings)
    sampler, drawn = made(kernels, slots + 1, vocab)
    states = [SamplerState(sampling, PROMPT, GENERATED) for sampling in settings]
    for slot, sampling in enumerate(settings):
        sampler.admit(slot, sampling, PROMPT, GENERATED, stream)
    rows = np.append(rng.permutation(slots), -1).astype(np.int32)
    rows[[2, -1]] = rows[[-1, 2]]  # padding among the rows
    missed = 0
    for turn in range(12):
        logits = rng.standard_normal((slots + 1, vocab)).astype(np.float32) * (2 + turn)
        indices = np.full(slots + 1, len(GENERATED) + turn, np.int32)
        sampler(cp.asarray(logits), cp.asarray(rows), cp.asarray(indices), stream)
        tokens = cp.asnumpy(drawn.tokens)
        for row, slot in enumerate(rows):
            if slot < 0:
                continue
            wanted = sample(logits[row], states[slot], int(indices[row]))
            same = wanted.token == tokens[row]
            missed += not same
            assert int(sampler.last_tokens[slot]) == tokens[row]
            states[slot].accept(int(tokens[row]))
            if same and wanted.logprob is not None and wanted.top is not None:
                assert abs(float(drawn.logprobs[row]) - wanted.logprob) < 1e-3
                top = cp.asnumpy(drawn.top_tokens)[row, : len(wanted.top)]
                assert list(top) == [token for token, _ in wanted.top]
                values = cp.asnumpy(drawn.top_logprobs)[row, : len(wanted.top)]
                assert np.allclose(values, [value for _, value in wanted.top], atol=1e-3)
    assert missed <= 1, f"{missed} of {12 * slots} draws differ"


def test_equal_logits_are_cut_at_the_first_tokens(kernels: Any, stream: Any) -> None:
    """Many equal logits: top-k and top-p keep the first of them, as the oracle does."""
    vocab = 5000
    logits = np.zeros((2, vocab), np.float32)
    logits[:, 4000:4003] = 1.0
    settings = [Sampling(top_k=1000, seed=1), Sampling(top_p=0.25, seed=1)]
    sampler, drawn = made(kernels, 2, vocab)
    for slot, sampling in enumerate(settings):
        sampler.admit(slot, sampling, [], [], stream)
    rows = cp.asarray(np.array([0, 1], np.int32))
    for index in range(40):
        sampler(cp.asarray(logits), rows, cp.asarray(np.array([index, index], np.int32)), stream)
        wanted = [sample(logits[0], SamplerState(sampling, [], []), index).token for sampling in settings]
        assert cp.asnumpy(drawn.tokens).tolist() == wanted


def test_rows_do_not_depend_on_neighbours(kernels: Any, stream: Any) -> None:
    vocab, rng = 32000, np.random.default_rng(3)
    logits = cp.asarray(rng.standard_normal((9, vocab)).astype(np.float32) * 4)
    sampler, drawn = made(kernels, 9, vocab)
    for slot in range(9):
        sampler.admit(slot, Sampling(seed=slot, top_p=0.9 if slot % 2 else 1.0), [], [], stream)
    index = cp.full(9, 4, cp.int32)
    sampler(logits, cp.arange(9, dtype=cp.int32), index, stream)
    together = cp.asnumpy(drawn.tokens)
    for slot in range(9):
        sampler(logits[slot : slot + 1], cp.full(1, slot, cp.int32), index[:1], stream)
        assert int(drawn.tokens[0]) == together[slot]


def test_logits_that_are_not_finite_are_told(kernels: Any, stream: Any) -> None:
    vocab = 9000
    logits = np.random.default_rng(1).standard_normal((3, vocab)).astype(np.float32)
    logits[0, 8999], logits[1, 17] = np.nan, np.inf
    sampler, drawn = made(kernels, 3, vocab)
    for slot in range(3):
        sampler.admit(slot, Sampling(seed=1, top_k=slot * 20), [], [], stream)
    sampler(cp.asarray(logits), cp.arange(3, dtype=cp.int32), cp.zeros(3, cp.int32), stream)
    assert cp.asnumpy(drawn.tokens)[:2].tolist() == [-1, -1]
    assert int(drawn.tokens[2]) >= 0


def test_rows_too_flat_for_the_pool(kernels: Any, stream: Any) -> None:
    """More tokens are in question than are sorted in shared memory: the slow way gives the oracle's tokens too."""
    vocab, rng = 60000, np.random.default_rng(11)
    settings = [
        Sampling(seed=1, top_p=0.6),
        Sampling(seed=2, top_k=9000),
        Sampling(seed=3, top_k=20000, top_p=0.5),
        Sampling(seed=4, min_p=0.1),
    ]
    sampler, drawn = made(kernels, 4, vocab)
    for slot, sampling in enumerate(settings):
        sampler.admit(slot, sampling, [], [], stream)
    rows, missed = cp.arange(4, dtype=cp.int32), 0
    for index in range(6):
        logits = rng.standard_normal((4, vocab)).astype(np.float32) * 0.3
        sampler(cp.asarray(logits), rows, cp.full(4, index, cp.int32), stream)
        wanted = [
            sample(row, SamplerState(sampling, [], []), index).token
            for row, sampling in zip(logits, settings, strict=True)
        ]
        missed += int((cp.asnumpy(drawn.tokens) != wanted).sum())
    assert missed <= 1
