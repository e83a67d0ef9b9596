"""Splits against all splits there are."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.plan.split import balance, bounds, can_split, parse_split, rooms, whole_split


def all_splits(n_layers, n_stages):
    for cuts in combinations(range(1, n_layers), n_stages - 1):
        ends = [*cuts, n_layers]
        yield tuple(end - start for start, end in zip([0, *cuts], ends, strict=True))


@st.composite
def problems(draw):
    n_layers = draw(st.integers(1, 8))
    n_stages = draw(st.integers(1, min(n_layers, 4)))
    weights = draw(st.lists(st.integers(0, 9), min_size=n_layers, max_size=n_layers))
    sizes = draw(st.lists(st.integers(-5, 30), min_size=n_stages, max_size=n_stages))
    return n_layers, n_stages, lambda stage, first, end: sizes[stage] - sum(weights[first:end])


@given(problems())
def test_balance_is_the_best_of_all_splits(problem):
    n_layers, n_stages, room = problem
    split = balance(n_layers, n_stages, room)
    everything = list(all_splits(n_layers, n_stages))
    assert split in everything
    assert sorted(rooms(split, room)) == max(sorted(rooms(other, room)) for other in everything)


@given(problems())
def test_it_can_be_split_when_some_split_fits(problem):
    n_layers, n_stages, room = problem
    fits = any(min(rooms(split, room)) >= 0 for split in all_splits(n_layers, n_stages))
    assert can_split(n_layers, n_stages, room) == fits


def test_bounds():
    assert bounds((3, 1, 2)) == [(0, 3), (3, 4), (4, 6)]
    assert bounds((5,)) == [(0, 5)]


@pytest.mark.parametrize(("text", "split"), [("auto", None), ("23,25", (23, 25)), ("23", (23,)), ("1, 2,3", (1, 2, 3))])
def test_splits_as_they_are_written(text, split):
    assert parse_split(text) == split


@pytest.mark.parametrize("text", ["", "0,48", "-1,49", "23,", "a,b", "²,1", "Auto"])
def test_what_is_no_split(text):
    with pytest.raises(ConfigError, match="--layer-split"):
        parse_split(text)


def test_the_last_stage_may_be_left_out():
    assert whole_split((23,), 48, 2) == (23, 25)
    assert whole_split((23, 25), 48, 2) == (23, 25)
    assert whole_split((48,), 48, 1) == (48,)


@pytest.mark.parametrize(
    ("given_split", "stages", "said"),
    [
        ((23, 24), 2, "makes 47 layers, the model has 48"),
        ((48,), 2, "gives 1 stages, there are 2"),
        ((16, 16, 16), 2, "gives 3 stages"),
        ((47,), 1, "makes 47"),
    ],
)
def test_a_split_that_cannot_be_is_refused(given_split, stages, said):
    with pytest.raises(ConfigError, match=said):
        whole_split(given_split, 48, stages)
