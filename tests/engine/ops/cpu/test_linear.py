"""linear against the twin, and to the bit against itself at every batch size, place, split and number of threads."""

from dataclasses import replace

import numpy as np
import pytest

from engine.ops import reference
from engine.ops.cpu.linear import Matrix, linear
from engine.ops.cpu.memory import aligned_empty
from tests.engine.ops.cpu.matrices import plain, quantised, random, values

BATCHES = (1, 2, 3, 7, 8, 9, 31, 32, 33, 64)
# Rows of the matrix: whole tiles, a remainder of one, two and three, fewer than one tile.
SHAPES = ((64, 128), (97, 96), (30, 64), (3, 288), (1, 32), (131, 576))


def run(x: np.ndarray, matrix: Matrix, threads: int = 2, onto: np.ndarray | None = None) -> np.ndarray:
    out = np.full((len(x), matrix.shape[1]), np.nan, np.float32) if onto is None else onto.copy()
    panels = aligned_empty((threads, 4 * matrix.shape[2]))
    linear(x, np.array([0, len(x)]), matrix, out, panels, onto=onto is not None)
    return out


def kinds(rng: np.random.Generator, rows: int, cols: int) -> list[Matrix]:
    return [
        quantised(rng, 1, rows, cols, 32),
        quantised(rng, 1, rows, cols, 16),
        quantised(rng, 1, rows, cols, 32, offset=False),
        plain(rng, 1, rows, cols),
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_twin(rng, shape):
    x = random(rng, 9, shape[1])
    for matrix in kinds(rng, *shape):
        expected = reference.linear(x.astype(np.float64), values(matrix)[0].astype(np.float64))
        # Error of a float32 sum of `cols` products: their magnitudes times a few units of 2**-24.
        bound = 8 * 2**-24 * (np.abs(x) @ np.abs(values(matrix)[0]).T)
        assert (np.abs(run(x, matrix) - expected) <= bound).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_every_batch_and_place(rng, shape):
    x = random(rng, max(BATCHES), shape[1])
    for matrix in kinds(rng, *shape):
        alone = np.concatenate([run(row[None], matrix) for row in x])
        for batch in BATCHES:
            places = rng.permutation(len(x))[:batch]
            assert (run(x[places], matrix) == alone[places]).all()


def test_threads_change_nothing(rng):
    for matrix in kinds(rng, 97, 96):
        for batch in (1, 5, 40):
            x = random(rng, batch, 96)
            assert (run(x, matrix, threads=1) == run(x, matrix, threads=2)).all()
            assert (run(x, matrix, threads=1) == run(x, matrix, threads=5)).all()


@pytest.mark.parametrize("cols", [8, 24, 40, 1, 17])
def test_float_weights_may_have_any_number_of_columns(rng, cols):
    matrix, x = plain(rng, 1, 21, cols), random(rng, 9, cols)
    out = run(x, matrix)
    np.testing.assert_allclose(out, x @ values(matrix)[0].T, rtol=1e-4, atol=1e-5)
    assert (run(x[4:5], matrix) == out[4:5]).all()


def test_bias_and_onto(rng):
    x, before = random(rng, 5, 64), random(rng, 5, 30)
    for matrix in kinds(rng, 30, 64):
        product = run(x, matrix)
        bias = random(rng, 30)
        biased = replace(matrix, bias=bias)
        assert (run(x, biased) == bias + product).all()
        assert (run(x, matrix, onto=before) == before + product).all()


def test_experts_see_their_own_rows_only(rng):
    starts = np.array([0, 3, 3, 4, 9])
    for matrix in (quantised(rng, 4, 30, 64, 16), quantised(rng, 4, 30, 64, 32), plain(rng, 4, 30, 64)):
        x = random(rng, 9, 64)
        out = np.full((9, 30), np.nan, np.float32)
        linear(x, starts, matrix, out, aligned_empty((2, 4 * 64)))
        for expert in range(4):
            part = slice(starts[expert], starts[expert + 1])
            for row, result in zip(x[part], out[part], strict=True):
                assert (run(row[None], one_expert(matrix, expert)) == result).all()


def one_expert(matrix: Matrix, expert: int) -> Matrix:
    part = slice(expert, expert + 1)
    if matrix.codes is None:
        return Matrix.plain(matrix.values[part])
    return Matrix.quantised(matrix.codes[part], matrix.scales[part], matrix.offsets[part], matrix.group)


def test_more_rows_than_a_block(rng):
    matrix, x = quantised(rng, 1, 22, 64, 32), random(rng, 300, 64)
    out = run(x, matrix)
    for place in (0, 127, 128, 255, 299):
        assert (run(x[place : place + 1], matrix) == out[place]).all()


def test_shapes_are_checked(rng):
    matrix = plain(rng, 1, 8, 32)
    with pytest.raises(AssertionError):
        run(random(rng, 2, 16), matrix)
