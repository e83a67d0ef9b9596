"""Dequantisation against the gguf package, to the bit, and codes against dequantisation."""

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from engine.gguf import open_gguf
from engine.gguf.quants import QUANTS, Codes, QuantType, codes, dequantise, quant_name
from tests.golden.cases import GoldenCase, golden_cases

PLAIN = (QuantType.F32, QuantType.F16, QuantType.BF16)
CODED = [quant for quant in QUANTS if quant not in PLAIN]
MORE_THAN_A_SLICE = (3, 5, 9 * 1024)


def random_bytes(quant: QuantType, elements: int) -> npt.NDArray[np.uint8]:
    """Any bytes at all are valid blocks; every code, scale, sign and grid point turns up, NaN and infinity too."""
    spec = QUANTS[quant]
    rng = np.random.default_rng(quant)
    return rng.integers(0, 256, elements // spec.block_elements * spec.block_bytes, dtype=np.uint8)


def reference(raw: npt.NDArray[np.uint8], quant: QuantType) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(quant))


def assert_same_bits(mine: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    assert mine.dtype == np.float32
    both_nan = np.isnan(mine) & np.isnan(expected)
    assert np.array_equal(np.where(both_nan, 0, mine.view(np.uint32)), np.where(both_nan, 0, expected.view(np.uint32)))


def multiplied_out(taken: Codes) -> npt.NDArray[np.float32]:
    weights = np.repeat(taken.scale, taken.group, axis=-1) * taken.codes
    return weights if taken.offset is None else weights + np.repeat(taken.offset, taken.group, axis=-1)


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.name)
def test_random_blocks_equal_the_gguf_package(quant: QuantType) -> None:
    raw = random_bytes(quant, int(np.prod(MORE_THAN_A_SLICE)))
    mine = dequantise(raw, quant, MORE_THAN_A_SLICE)
    assert mine.shape == MORE_THAN_A_SLICE
    assert_same_bits(mine, reference(raw, quant).reshape(MORE_THAN_A_SLICE))


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case.name)
def test_golden_tensors_equal_the_gguf_package(case: GoldenCase) -> None:
    file = open_gguf(str(case.model))
    for name, info in file.tensors.items():
        raw = file.tensor_bytes(name)
        assert_same_bits(dequantise(raw, info.quant, info.shape), reference(raw, info.quant).reshape(info.shape))


def test_golden_files_cover_every_quantisation() -> None:
    files = [open_gguf(str(case.model)) for case in golden_cases()]
    assert {info.quant for file in files for info in file.tensors.values()} == set(QUANTS)


@pytest.mark.parametrize("quant", CODED, ids=lambda quant: quant.name)
def test_codes_multiply_out_to_the_weights(quant: QuantType) -> None:
    raw = random_bytes(quant, int(np.prod(MORE_THAN_A_SLICE)))
    taken = codes(raw, quant, MORE_THAN_A_SLICE)
    assert taken.codes.dtype == np.int8
    assert taken.group in (16, 32)
    assert taken.codes.shape == MORE_THAN_A_SLICE
    groups = (*MORE_THAN_A_SLICE[:-1], MORE_THAN_A_SLICE[-1] // taken.group)
    assert taken.scale.shape == groups
    assert taken.offset is None or taken.offset.shape == groups
    with np.errstate(all="ignore"):
        assert_same_bits(multiplied_out(taken), dequantise(raw, quant, MORE_THAN_A_SLICE))


def test_a_block_worked_out_by_hand() -> None:
    halves = np.float16([0.5, -1.0]).tobytes()
    packed = bytes([0x21] + [0] * 14 + [0xF3])  # weight 0 is 1, 16 is 2, 15 is 3, 31 is 15
    raw = np.frombuffer(halves + packed, np.uint8)
    expected = np.full(32, -1.0)
    expected[[0, 16, 15, 31]] = [-0.5, 0.0, 0.5, 6.5]
    assert dequantise(raw, QuantType.Q4_1, (32,)).tolist() == expected.tolist()
    taken = codes(raw, QuantType.Q4_1, (32,))
    assert taken.codes[[0, 15, 16, 31]].tolist() == [1, 3, 2, 15]
    assert (taken.scale.tolist(), taken.group) == ([0.5], 32)
    assert taken.offset is not None
    assert taken.offset.tolist() == [-1.0]


@pytest.mark.parametrize("quant", PLAIN, ids=lambda quant: quant.name)
def test_plain_types_have_no_codes(quant: QuantType) -> None:
    with pytest.raises(AssertionError, match=f"{quant.name} has no codes"):
        codes(random_bytes(quant, 32), quant, (32,))


def test_sizes_and_names_are_those_of_the_gguf_package() -> None:
    for quant, spec in QUANTS.items():
        assert (spec.block_elements, spec.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(quant)]
    for known in gguf.GGMLQuantizationType:
        assert quant_name(known) in (known.name, str(known.value))  # a type newer than ours has its number only
    assert quant_name(gguf.GGMLQuantizationType.IQ1_S) == "IQ1_S"
    assert quant_name(12345) == "12345"
