"""Codes and scales taken out of blocks multiply out to the reader's weights, by the constants that layout.py gives."""

import numpy as np
import pytest

from engine.gguf.quants import QUANTS, QuantType, dequantise
from engine.ops.cuda.fields import join, split
from engine.ops.cuda.layout import FORMATS, Scales
from tests.engine.ops.cuda.weights import random_matrix

QUANTISED = [quant for quant in FORMATS if QUANTS[quant].group]


@pytest.mark.parametrize("quant", QUANTISED, ids=lambda quant: quant.name)
def test_join_undoes_split(quant: QuantType) -> None:
    raw = np.random.default_rng(quant).integers(0, 256, 600 * QUANTS[quant].block_bytes, dtype=np.uint8)
    assert np.array_equal(join(split(raw, quant), quant), raw)


@pytest.mark.parametrize("quant", QUANTISED, ids=lambda quant: quant.name)
def test_the_format_says_what_the_codes_mean(quant: QuantType) -> None:
    form, rows, k = FORMATS[quant], 8, 1024
    raw = random_matrix(quant, rows, k)
    fields = split(raw, quant)
    codes = fields.codes.astype(np.float64)
    if form.levels:
        weights = np.array(form.levels, np.float64)[fields.codes]
    else:
        weights = (2 * codes + 1 if form.odd else codes) - form.bias
    if form.scales is Scales.E32:
        scale = 2.0 ** (fields.d.astype(np.float64) - 128)
    else:
        scale = fields.d.view(np.float16).astype(np.float64)
    scale, minimum = scale[:, None] * form.constant, 0.0
    if fields.scales is not None:
        stored = fields.scales & 15 if form.scales is Scales.SUPER16_MIN else fields.scales
        scale = scale * (stored.astype(np.float64) - form.scale_bias)
    if fields.dmin is not None:
        minimum = fields.dmin.view(np.float16).astype(np.float64)[:, None]
        if form.scales is Scales.DM32:
            minimum = -minimum
        else:
            steps = fields.minima if fields.minima is not None else fields.scales >> 4
            minimum = minimum * steps.astype(np.float64)
        minimum = np.repeat(minimum, codes.shape[1] // minimum.shape[1], axis=1)
    ours = weights * np.repeat(scale, codes.shape[1] // scale.shape[1], axis=1) - minimum
    assert np.allclose(ours.reshape(rows, k), dequantise(raw, quant, (rows, k)), rtol=1e-6, atol=1e-7)
