"""The typed getters: what they take, what they refuse, and how they say so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.gguf import GgufFile, ValueType, open_gguf
from engine.gguf.file_type import quantisation_name
from engine.gguf.quants import QuantType, dequantise
from engine.gguf.values import SCALARS
from tests.engine.gguf.building import Draft, Raw, Tensor, small_draft
from tests.golden.cases import golden_cases


def opened(folder: Path, **metadata: Any) -> GgufFile:
    draft = small_draft()
    draft.metadata |= metadata
    return open_gguf(draft.write(folder))


def scalar(kind: ValueType, value: float) -> Raw:
    return Raw(kind, SCALARS[kind].pack(value))


def test_getters_give_values_and_defaults(tmp_path: Path) -> None:
    file = opened(
        tmp_path,
        wide=scalar(ValueType.UINT64, 2**32 - 1),
        signed=scalar(ValueType.INT32, 5),
        half=0.5,
        yes=True,
        name="x",
    )
    assert file.u32("wide") == 2**32 - 1
    assert file.u32("signed") == 5
    assert file.f32("half") == 0.5
    assert file.f32("signed") == 5.0
    assert file.flag("yes") is True
    assert file.text("name") == "x"
    assert file.u32("none", 3) == 3
    assert file.f32("none", None) is None
    assert file.text("none", "") == ""
    assert file.flag("none", False) is False
    assert file.array("none", None) is None


GETTERS: list[Callable[[GgufFile, str], Any]] = [
    GgufFile.u32,
    GgufFile.f32,
    GgufFile.text,
    GgufFile.flag,
    GgufFile.array,
    GgufFile.tensor,
    GgufFile.tensor_bytes,
]


@pytest.mark.parametrize("getter", GETTERS)
def test_what_is_missing_is_named(tmp_path: Path, getter: Callable[[GgufFile, str], Any]) -> None:
    with pytest.raises(ModelFileError, match=r"model\.gguf: llama\.absent: this .* is missing"):
        getter(opened(tmp_path), "llama.absent")


@pytest.mark.parametrize(
    ("getter", "value", "message"),
    [
        (GgufFile.u32, -1, "key: -1 is outside 0 to 4294967295"),
        (GgufFile.u32, 2**32, "key: 4294967296 is outside"),
        (GgufFile.u32, 1.0, r"key: expected a whole number, found 1\.0"),
        (GgufFile.u32, True, "key: expected a whole number, found True"),
        (GgufFile.u32, [1], "key: expected a whole number, found an array"),
        (GgufFile.f32, float("nan"), "key: nan is not a finite number"),
        (GgufFile.f32, float("inf"), "key: inf is not a finite number"),
        (GgufFile.f32, "1.0", "key: expected a number, found '1.0'"),
        (GgufFile.text, 1, "key: expected a string, found 1"),
        (GgufFile.flag, 1, "key: expected true or false, found 1"),
        (GgufFile.array, "a\nb", r"key: expected an array, found 'a\\nb'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(
    tmp_path: Path, getter: Callable[[GgufFile, str], Any], value: Any, message: str
) -> None:
    given = scalar(ValueType.INT64, value) if type(value) is int else value
    with pytest.raises(ModelFileError, match=message):
        getter(opened(tmp_path, key=given), "key")


def test_arrays_know_what_they_hold(tmp_path: Path) -> None:
    file = opened(tmp_path)
    with pytest.raises(ModelFileError, match="texts: is an array of strings, expected numbers"):
        file.array("texts").numbers()
    with pytest.raises(ModelFileError, match="numbers: is an array of numbers, expected strings"):
        file.array("numbers").strings()


def test_a_string_that_is_not_utf8_is_still_there_as_bytes(tmp_path: Path) -> None:
    draft = small_draft()
    path = tmp_path / "model.gguf"
    draft.metadata["texts"] = ["ab", "cXd"]
    path.write_bytes(draft.image().replace(b"cXd", b"c\xffd"))
    texts = open_gguf(str(path)).array("texts")
    assert texts.raw_strings() == [b"ab", b"c\xffd"]
    with pytest.raises(ModelFileError, match="texts: holds a string that is not UTF-8"):
        texts.strings()


def test_weights_that_are_not_finite_are_refused_by_tensor(tmp_path: Path) -> None:
    infinite_scale = b"\x00\x7c" + bytes(16)
    nan = np.float32([1, np.nan]).tobytes()
    tensors = {"codes": Tensor((32,), QuantType.Q4_0, infinite_scale), "plain": Tensor((2,), QuantType.F32, nan)}
    file = open_gguf(Draft({}, tensors).write(tmp_path))
    for take, name in ((file.codes, "codes"), (file.dequantised, "codes"), (file.dequantised, "plain")):
        with pytest.raises(ModelFileError, match=rf"{name}: holds NaN or infinity"):
            take(name)


def test_weights_are_those_of_the_bytes() -> None:
    case = next(case for case in golden_cases(["qwen3"]) if case.manifest["quant"] == "Q8_0")
    file = open_gguf(str(case.model))
    name = "blk.0.attn_q.weight"
    info = file.tensor(name)
    expected = dequantise(file.tensor_bytes(name), info.quant, info.shape)
    assert np.array_equal(file.dequantised(name), expected)
    taken = file.codes(name)
    assert taken.codes.shape == info.shape
    assert taken.scale.shape == (info.shape[0], info.shape[1] // 32)


@pytest.mark.parametrize(
    ("file_type", "quant", "name"),
    [
        (15, QuantType.Q4_K, "Q4_K_M"),
        (1, QuantType.Q4_K, "Q4_K"),
        (1, QuantType.F16, "F16"),
        (1024 + 3, QuantType.Q4_1, "Q4_1"),
        (27, QuantType.IQ3_S, "IQ3_M"),
        (999, QuantType.Q6_K, "Q6_K"),
        (None, QuantType.Q6_K, "Q6_K"),
    ],
)
def test_the_name_of_the_quantisation(tmp_path: Path, file_type: int | None, quant: QuantType, name: str) -> None:
    block = {QuantType.Q4_K: 144, QuantType.F16: 512, QuantType.Q4_1: 160, QuantType.IQ3_S: 110, QuantType.Q6_K: 210}
    tensors = {"norm": Tensor((32,), data=bytes(128)), "matrix": Tensor((256,), quant, bytes(block[quant]))}
    metadata = {} if file_type is None else {"general.file_type": file_type}
    assert quantisation_name(open_gguf(Draft(metadata, tensors).write(tmp_path))) == name
    assert quantisation_name(open_gguf(Draft().write(tmp_path, "vocabulary.gguf"))) == "none"
