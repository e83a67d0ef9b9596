"""relay.cu against its twin, byte for byte."""

from typing import Any

import cupy as cp
import numpy as np
import pytest

from engine.gguf.quants import QUANTS, QuantType
from engine.ops.cuda.layout import FORMATS, greatest, lay, numbers
from engine.ops.cuda.relay import Extremes, Relay
from tests.engine.ops.cuda.weights import random_matrix


@pytest.mark.parametrize("quant", [pytest.param(quant, id=quant.name) for quant in FORMATS])
def test_the_same_bytes_as_the_twin(kernels: Any, stream: Any, quant: QuantType) -> None:
    form, small = FORMATS[quant], QUANTS[quant].block_elements <= 32
    relay = Relay(kernels, form)
    for rows, k in [(40, 768), (16, 256), (100, 96 if small else 1024)]:
        raw = [random_matrix(quant, rows, k, seed) for seed in range(4)]
        laid = np.stack([lay(matrix, quant, rows, k) for matrix in raw])
        records, extremes = cp.full(laid.shape, 0xAA, cp.uint8), Extremes.of(form)
        relay(cp.asarray(np.concatenate(raw)), records, rows, k, extremes, stream)
        assert np.array_equal(cp.asnumpy(records), laid), (rows, k)
        found = [greatest(matrix, quant) for matrix in raw]
        assert extremes.numbers() == numbers(form, max(d for d, _ in found), max(m for _, m in found))

        pair = cp.full((2, 2 * laid.shape[1], *laid.shape[2:]), 0xAA, cp.uint8)
        for member in (0, 1):
            mine = np.concatenate(raw[member::2])
            relay(cp.asarray(mine), pair, rows, k, extremes, stream, member=member, members=2)
        assert np.array_equal(cp.asnumpy(pair[0, 1::2]), laid[1])
        assert np.array_equal(cp.asnumpy(pair[1, 0::2]), laid[2])
