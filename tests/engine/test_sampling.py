"""The sampler against its formulas, and its noise against the published vectors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.messages import Sampling
from engine.sampling import BadLogits, SamplerState, gumbel, philox, philox_words, sample

ONES = 0xFFFFFFFF


def draw(logits, index=0, prompt=(), generated=(), **parameters):
    state = SamplerState(Sampling(**parameters), list(prompt), list(generated))
    return sample(np.asarray(logits, np.float32), state, index)


def tokens(logits, count, **parameters):
    state = SamplerState(Sampling(**parameters), [], [])
    logits = np.asarray(logits, np.float32)
    return np.array([sample(logits, state, index).token for index in range(count)])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert philox(tuple(np.uint64(word) for word in counter), key) == expected


def test_counter_and_key_words_are_where_the_design_puts_them():
    seed = 0x299F31D0_A4093822
    [word] = philox_words(np.array([7]), 11, 2, seed)
    expected = philox((np.uint64(7), np.uint64(11), np.uint64(2), np.uint64(0)), (0xA4093822, 0x299F31D0))
    assert word == expected[0]
    others = [(12, 2, seed), (11, 3, seed), (11, 2, seed + 1), (11, 2, seed + 2**32)]
    assert word not in [philox_words(np.array([7]), *other)[0] for other in others]


def test_noise_is_standard_gumbel_and_finite_at_both_ends():
    noise = gumbel(philox_words(np.arange(200_000), 0, 0, 5))
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    least, greatest = gumbel(np.array([0, ONES], np.uint64))
    assert least == pytest.approx(-np.log(33 * np.log(2)))
    assert greatest == pytest.approx(33 * np.log(2))


def total_variation(found, probabilities):
    return np.abs(np.bincount(found, minlength=len(probabilities)) / len(found) - probabilities).sum() / 2


def softmax(logits):
    weights = np.exp(np.asarray(logits, float) - np.max(logits))
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    logits = np.array([2.0, 1.0, 0.0, -1.0, 1.0, -3.0, 0.5, 2.2])
    found = tokens(logits, 2500, temperature=temperature, seed=3)
    # Expected distance for 8 cells and 2500 draws is about 0.02.
    assert total_variation(found, softmax(logits / temperature)) < 0.045


def test_frequencies_within_top_k_top_p_and_min_p():
    logits = np.log([0.4, 0.3, 0.15, 0.1, 0.05])
    for parameters, kept in [
        ({"top_k": 2}, 2),
        ({"top_p": 0.71}, 3),
        ({"min_p": 0.3}, 3),
        ({"top_k": 4, "top_p": 0.75}, 3),  # 0.7 / 0.95 falls short of 0.75, so the third stays
        ({"top_k": 3, "min_p": 0.5}, 2),
    ]:
        expected = np.where(np.arange(5) < kept, np.exp(logits), 0)
        found = tokens(logits, 1500, seed=9, **parameters)
        assert total_variation(found, expected / expected.sum()) < 0.04
        assert found.max() == kept - 1


def test_a_draw_depends_on_seed_index_and_choice_alone():
    logits = np.random.default_rng(0).normal(size=500)
    drawn = tokens(logits, 50, seed=1)
    assert (drawn == tokens(logits, 50, seed=1)).all()
    assert (drawn != tokens(logits, 50, seed=2)).any()
    assert (drawn != tokens(logits, 50, seed=1 + 2**32)).any()
    assert (drawn != tokens(logits, 50, seed=1, choice=1)).any()
    assert draw(logits, 37, seed=1).token == drawn[37]


@given(
    hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-30, 30, width=32)),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.01, 0.3, 1.0, 5.0]),
    st.sampled_from([0, 1, 3, 100]),
    st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
    st.sampled_from([0.0, 0.02, 1.0]),
)
def test_equals_the_plain_formula(logits, seed, temperature, top_k, top_p, min_p):
    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    scaled = (logits.astype(float) - float(logits.max())) / temperature
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = order[: top_k or len(order)]
    if top_p < 1:
        mass = np.cumsum(np.exp(scaled[kept]))
        kept = kept[: next(n for n, m in enumerate(mass, 1) if m >= top_p * mass[-1])]
    kept = sorted(token for token in kept if min_p == 0 or scaled[token] >= np.log(min_p))
    scores = scaled[kept] + gumbel(philox_words(np.array(kept), 4, 0, seed))
    assert draw(logits, 4, seed=seed, **parameters).token == kept[int(np.argmax(scores))]


def test_a_wide_row_is_the_same_with_and_without_short_cuts():
    # Most of 3000 tokens are out of the race by their bound, and more than the head of the nucleus is kept.
    logits = np.random.default_rng(1).normal(scale=6, size=3000).astype(np.float32)
    noise = [gumbel(philox_words(np.arange(3000), index, 0, 2)) for index in range(40)]
    assert tokens(logits, 40, seed=2).tolist() == [int(np.argmax(logits + row)) for row in noise]
    flat = logits / 8
    mass = np.cumsum(np.sort(np.exp(flat.astype(float) - float(flat.max())))[::-1])
    kept = int(np.searchsorted(mass, 0.98 * mass[-1])) + 1
    assert kept > 1024
    nucleus = np.where(np.argsort(np.argsort(-flat)) < kept, flat, -np.inf)
    found = tokens(flat, 40, seed=2, top_p=0.98).tolist()
    assert found == [int(np.argmax(nucleus + row)) for row in noise]


def test_greedy_takes_the_lowest_id_on_ties():
    assert draw([1, 3, 3, 2], temperature=0, top_k=1).token == 1


def test_top_k_takes_the_lowest_ids_on_ties():
    assert set(tokens([1, 2, 2, 2, 2], 200, top_k=2, temperature=9)) == {1, 2}
    assert set(tokens([0, 0, 0], 200, top_k=50)) == {0, 1, 2}


def test_top_p_keeps_at_least_one_and_the_lowest_ids_on_ties():
    assert set(tokens([0, 2, 2, 1], 100, top_p=1e-12)) == {1}
    assert set(tokens([0, 0, 0, 0], 200, top_p=0.5)) == {0, 1}


def test_min_p_of_one_keeps_the_best_alone():
    assert set(tokens([0, 2, 1], 50, min_p=1.0)) == {1}


def test_a_tiny_temperature_is_greedy_without_a_warning():
    assert draw([0, 5, 4.99, -80], temperature=1e-310, seed=4).token == 1


def test_logit_bias_moves_bans_and_forces():
    assert draw([1, 2, 3], temperature=0, logit_bias=((0, 5.0),)).token == 0
    assert draw([1, 2, 3], temperature=0, logit_bias=((2, -100.0), (1, -100.0))).token == 0


def test_repetition_penalty_covers_prompt_and_output_whatever_the_sign():
    assert draw([2, 1.9], temperature=0, prompt=[0], repetition_penalty=1.2).token == 1
    assert draw([2, 1.9], temperature=0, generated=[0], repetition_penalty=1.2).token == 1
    assert draw([-1, -1.1], temperature=0, prompt=[0], repetition_penalty=1.2).token == 1


def test_presence_and_frequency_count_the_output_only():
    assert draw([2, 1.9], temperature=0, prompt=[0], presence_penalty=1, frequency_penalty=1).token == 0
    assert draw([2, 1.9], temperature=0, generated=[0], presence_penalty=1).token == 1
    assert draw([2, 1.65], temperature=0, generated=[0], frequency_penalty=0.2).token == 0
    assert draw([2, 1.65], temperature=0, generated=[0, 0], frequency_penalty=0.2).token == 1


def test_penalties_follow_accepted_tokens_and_a_resume_equals_going_on():
    sampling = Sampling(temperature=0, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2, seed=1)
    logits = np.random.default_rng(2).normal(size=40).astype(np.float32)
    state, output = SamplerState(sampling, [3, 4, 4], []), []
    for index in range(60):
        resumed = sample(logits, SamplerState(sampling, [3, 4, 4], output), index)
        output.append(sample(logits, state, index).token)
        assert resumed.token == output[-1]
        state.accept(output[-1])
    assert len(set(output)) > 10


def test_logprobs_are_those_of_the_raw_logits():
    logits = np.array([1.0, 3.0, 2.0, 3.0])
    expected = np.log(softmax(logits))
    adjusted = {"top_k": 1, "logit_bias": ((0, 50.0),), "repetition_penalty": 2.0}
    drawn = draw(logits, prompt=[1], temperature=0.2, logprobs=3, **adjusted)
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(expected[0], abs=1e-6)
    assert [token for token, _ in drawn.top] == [1, 3, 2]
    assert [value for _, value in drawn.top] == pytest.approx(expected[[1, 3, 2]], abs=1e-6)


def test_logprobs_zero_gives_the_chosen_alone_and_none_gives_nothing():
    assert draw([0, 1], temperature=0, logprobs=0).top == []
    assert draw([0, 1], temperature=0, logprobs=0).logprob == pytest.approx(np.log(softmax([0, 1]))[1])
    assert draw([0, 1], temperature=0)[1:] == (None, None)
    assert len(draw([0, 1], temperature=0, logprobs=20).top) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_that_is_not_finite_is_refused(bad, temperature):
    with pytest.raises(BadLogits):
        draw([0, 1, bad, 2], temperature=temperature)


def test_logits_are_left_as_they_were():
    logits = np.array([1, 2, 3], np.float32)
    draw(logits, prompt=[1], repetition_penalty=2.0, logit_bias=((0, 1.0),), logprobs=2)
    assert logits.tolist() == [1, 2, 3]
