"""The re-lay of weights loses nothing, and what the kernels will compute from it is the weights."""

import numpy as np
import pytest

from engine.gguf.quants import QUANTS, QuantType, dequantise
from engine.ops.cuda.layout import FORMATS, greatest, lay, numbers, unlay
from tests.engine.ops.cuda.weights import random_matrix

SHAPES = [(16, 256), (33, 512), (5, 768)]


@pytest.mark.parametrize("quant", list(FORMATS), ids=lambda quant: quant.name)
def test_unlay_gives_the_same_bytes(quant: QuantType) -> None:
    spec = QUANTS[quant]
    shapes = (
        SHAPES + ([(17, 96), (16, 32)] if spec.block_elements == 32 else []) + ([(7, 100)] if not spec.group else [])
    )
    for rows, k in shapes:
        raw = random_matrix(quant, rows, k)
        laid = lay(raw, quant, rows, k)
        assert laid.shape == FORMATS[quant].shape(rows, k)
        assert np.array_equal(unlay(laid, quant, rows, k), raw), (rows, k)


@pytest.mark.parametrize("quant", list(FORMATS), ids=lambda quant: quant.name)
def test_random_matrices_are_sane(quant: QuantType) -> None:
    weights = dequantise(random_matrix(quant, 32, 512), quant, (32, 512))
    assert 0.3 < np.sqrt(np.mean(np.square(weights))) * 512**0.5 < 4


def test_every_type_that_the_reader_knows_has_a_format() -> None:
    assert set(FORMATS) == set(QuantType)


def test_records_are_loadable_in_16_bytes() -> None:
    for form in FORMATS.values():
        assert form.record_bytes % 16 == 0
        assert form.scales_at % 16 == 0
        assert form.high_at % 16 == 0


@pytest.mark.parametrize("quant", list(FORMATS), ids=lambda quant: quant.name)
def test_scales_stay_finite_in_half_precision(quant: QuantType) -> None:
    form = FORMATS[quant]
    if form.scales == 0:
        return
    d, minimum = greatest(random_matrix(quant, 32, 512), quant)
    n = numbers(form, d, minimum)
    scale = 2.0 ** (d - 128) if form.scales == 3 else d * form.scale_limit * form.constant
    assert 2.0**13 < scale * n.up / form.constant <= 2.0**15
    assert n.out * 2.0**24 * form.constant == n.up * n.out * n.out


def test_weights_per_byte_are_near_the_files() -> None:
    """At most 5 % more bytes than the file for the types people use; lattice types become 4-bit codes, which cost
    more."""
    for quant in (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q4_0, QuantType.Q8_0, QuantType.IQ4_XS):
        spec, form = QUANTS[quant], FORMATS[quant]
        assert form.record_bytes / (16 * form.record_k) < 1.05 * spec.block_bytes / spec.block_elements
