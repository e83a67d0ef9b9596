"""The kernel against the NumPy twin: the same integers, so the same draws."""

import numpy as np

from engine.messages import Sampling
from engine.ops.cpu.philox import philox_words
from engine.sampling import SamplerState, sample
from engine.sampling import philox_words as twin


def test_same_words_over_the_whole_range_of_every_part():
    rng = np.random.default_rng(0)
    ids = np.concatenate((np.arange(300), rng.integers(0, 2**31, 300), [0, 2**31 - 1, 2**32 - 1]))
    for index, choice, seed in [
        (0, 0, 0),
        (5, 1, 2**63 + 12345),
        (2**32 - 1, 127, 2**64 - 1),
        (7, 0, 2**32 - 1),
        (7, 0, 2**32),
    ]:
        words = philox_words(ids, index, choice, seed)
        assert words.dtype == np.uint32
        assert (words == twin(ids, index, choice, seed)).all()


def test_no_survivors_no_words():
    assert len(philox_words(np.arange(0), 0, 0, 0)) == 0


def test_draws_are_those_of_the_twin():
    logits = np.random.default_rng(1).normal(scale=3, size=5000).astype(np.float32)
    for parameters in ({}, {"temperature": 2.0}, {"top_p": 0.9}, {"top_k": 7, "min_p": 0.1}):
        state = SamplerState(Sampling(seed=2**40 + 9, **parameters), [], [])
        for index in range(20):
            assert sample(logits, state, index, philox_words) == sample(logits, state, index)
