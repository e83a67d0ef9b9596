"""The reader against the gguf package on sound files, and against what a broken or foreign file may hold."""

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.gguf import ArrayValue, ValueType, open_gguf
from engine.gguf.quants import QuantType
from tests.engine.gguf.building import Draft, Raw, Tensor, array, small_draft, text
from tests.golden.cases import GoldenCase, golden_cases

ARRAY, STRING, UINT8, BOOL = ValueType.ARRAY, ValueType.STRING, ValueType.UINT8, ValueType.BOOL


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case.name)
def test_a_golden_file_reads_as_the_gguf_package_reads_it(case: GoldenCase) -> None:
    mine, reference = open_gguf(str(case.model)), gguf.GGUFReader(case.model)
    fields = {key: entry for key, entry in reference.fields.items() if not key.startswith("GGUF.")}
    assert list(mine.metadata) == list(fields)
    for key, entry in fields.items():
        assert plain(mine.metadata[key]) == entry.contents(), key
    assert list(mine.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        info = mine.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.quant, info.offset, info.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert np.array_equal(mine.tensor_bytes(tensor.name), tensor.data.view(np.uint8).reshape(-1))
    assert mine.size == case.manifest["bytes"]


def plain(value: Any) -> Any:
    if not isinstance(value, ArrayValue):
        return value
    return value.strings() if value.element_type is STRING else value.numbers().tolist()


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read(tmp_path: Path, version: int) -> None:
    draft = small_draft()
    draft.version = version
    draft.metadata["flags"] = array(BOOL, 3, b"\1\0\1")
    opened = open_gguf(draft.write(tmp_path))
    assert opened.version == version
    for kind in ValueType:
        if kind not in (ARRAY, STRING):
            read = opened.metadata[f"scalar.{kind.name.lower()}"]
            assert read == 1
            assert isinstance(read, bool) == (kind is BOOL)
    assert opened.text("text") == "grüße"
    assert opened.array("numbers").numbers().tolist() == [1, -2, 3]
    assert opened.array("flags").numbers().tolist() == [True, False, True]
    assert opened.array("texts").strings() == ["", "a", "ö"]
    assert opened.array("texts").raw_strings() == [b"", b"a", "ö".encode()]
    assert opened.tensors["b.weight"].shape == (2, 32)


def test_a_large_vocabulary_is_skipped_and_found_again(tmp_path: Path) -> None:
    tokens = [f"token{number}" for number in range(20_000)]
    draft = small_draft()
    draft.metadata |= {"tokens": tokens, "after": 7}
    opened = open_gguf(draft.write(tmp_path))
    assert opened.u32("after") == 7
    assert len(opened.array("tokens")) == 20_000
    assert opened.array("tokens").strings() == tokens


def test_an_open_descriptor_is_read_and_stays_open(tmp_path: Path) -> None:
    path = small_draft().write(tmp_path)
    descriptor = os.open(path, os.O_RDONLY)
    os.rename(path, tmp_path / "elsewhere.gguf")
    try:
        opened = open_gguf(path, descriptor)
        os.fstat(descriptor)
    finally:
        os.close(descriptor)
    assert opened.path == path
    assert opened.tensor_bytes("a.weight").nbytes == 24


def test_tensor_views_outlive_the_file_object(tmp_path: Path) -> None:
    draft = small_draft()
    draft.tensors["a.weight"].data = bytes(range(24))
    view = open_gguf(draft.write(tmp_path)).tensor_bytes("a.weight")
    assert view.tobytes() == bytes(range(24))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def changed(**changes: Any) -> Draft:
    draft = small_draft()
    for name, change in changes.items():
        setattr(draft, name, change)
    return draft


def with_key(key: str, value: Any) -> Draft:
    draft = small_draft()
    draft.metadata[key] = value
    return draft


def with_tensor(tensor: Tensor, name: str = "c.weight") -> Draft:
    draft = small_draft()
    draft.tensors[name] = tensor
    return draft


HUGE = 2**64 - 1
REFUSALS = [
    ("magic", changed(magic=b"lmgg"), r"magic: is b'lmgg', expected b'GGUF'"),
    ("version 1", changed(version=1), "version: GGUF version 1 is not supported; supported: 2, 3"),
    ("version 4", changed(version=4), "version: GGUF version 4"),
    ("big endian", changed(version=3 << 24), "version: the file is big-endian"),
    ("tensor count", changed(counts=(HUGE, None)), "tensor count: 18446744073709551615 is more than"),
    ("key count", changed(counts=(None, HUGE)), "metadata key count: 18446744073709551615 is more than"),
    ("one key too many", changed(counts=(None, 18)), r"metadata key \d+ of 18: .*the file ends before that"),
    ("unknown type", with_key("odd", Raw(13, b"")), "odd: value type 13 is unknown"),
    ("boolean 2", with_key("odd", Raw(BOOL, b"\2")), "odd: a boolean is 2"),
    ("string length", with_key("odd", Raw(STRING, struct.pack("<Q", HUGE))), "odd: 18446744073709551615 bytes from"),
    ("string not UTF-8", with_key("odd", Raw(STRING, text(b"\xff"))), r"odd: is not UTF-8 \(invalid start byte"),
    ("array of arrays", with_key("odd", array(ARRAY, 1, bytes(12))), "odd: an array of arrays"),
    ("array of unknown", with_key("odd", array(77, 1, bytes(12))), "odd: value type 77 is unknown"),
    ("numbers past the end", with_key("odd", array(UINT8, HUGE)), "odd: 18446744073709551615 bytes from"),
    ("numbers overflow", with_key("odd", array(ValueType.UINT64, HUGE)), r"odd: \d+ bytes from"),
    ("strings past the end", with_key("odd", array(STRING, HUGE)), "odd: 18446744073709551615 strings are announced"),
    ("string in array", with_key("odd", array(STRING, 2, struct.pack("<Q", HUGE - 8))), r"odd: \d+ bytes from"),
    ("string in array, 2^63", with_key("odd", array(STRING, 2, struct.pack("<Q", 2**63))), r"odd: \d+ bytes from"),
    ("alignment 0", with_key("general.alignment", 0), "general.alignment: 0 is not a power of two"),
    ("alignment 48", with_key("general.alignment", 48), "general.alignment: 48 is not a power of two"),
    ("alignment text", with_key("general.alignment", "32"), "general.alignment: '32' is not a power of two"),
    ("split", with_key("split.count", 3), "split.count: the model is split into 3 files"),
    ("no dimensions", with_tensor(Tensor((), data=bytes(4))), "tensor c.weight: has 0 dimensions"),
    ("five dimensions", with_tensor(Tensor((1,) * 5, data=bytes(4))), "tensor c.weight: has 5 dimensions"),
    ("zero size", with_tensor(Tensor((4, 0))), r"tensor c.weight: shape \[0, 4\] does not fit F32"),
    ("part of a block", with_tensor(Tensor((2, 33), QuantType.Q4_0, bytes(36))), "multiples of 32"),
    ("overflow", with_tensor(Tensor((2**32, 2**32, 4))), r"tensor c.weight: ends at byte \d+, but the file has"),
    ("unknown quantisation", with_tensor(Tensor((256,), 99)), "quantisation 99 is not supported; supported: F32, F16"),
    ("known quantisation", with_tensor(Tensor((256,), 19)), "quantisation IQ1_S is not supported"),
    ("misaligned", with_tensor(Tensor((1,), data=bytes(4), offset=130)), "offset 130 is not a multiple of the"),
    ("offset past the end", with_tensor(Tensor((1,), offset=2**62)), r"tensor c.weight: ends at byte \d+"),
    ("overlap", with_tensor(Tensor((1,), offset=0)), "overlaps tensor"),
]


@pytest.mark.parametrize(("draft", "message"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS])
def test_a_broken_or_foreign_file_is_refused_by_field(tmp_path: Path, draft: Draft, message: str) -> None:
    path = draft.write(tmp_path)
    with pytest.raises(ModelFileError, match=message) as caught:
        open_gguf(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).isprintable()


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    image = with_tensor(Tensor((2, 3), data=bytes(24)), "c.weight").image()
    with pytest.raises(ModelFileError, match=r"a\.weight: this tensor is there twice"):
        open_gguf(saved(tmp_path, image.replace(b"c.weight", b"a.weight")))
    with pytest.raises(ModelFileError, match=r"scalar\.int8: this metadata key is there twice"):
        open_gguf(saved(tmp_path, with_key("scalar.intX", 1).image().replace(b"scalar.intX", b"scalar.int8")))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    image = small_draft().image()
    needed = len(image) - 28  # b.weight has 36 bytes; the padding after it may be missing
    for length in range(needed):
        with pytest.raises(ModelFileError):
            open_gguf(saved(tmp_path, image[:length]))
    open_gguf(saved(tmp_path, image[:needed]))


def test_a_cut_file_names_the_tensor_and_both_sizes(tmp_path: Path) -> None:
    case = golden_cases(["llama"])[0]
    path = saved(tmp_path, case.model.read_bytes()[:-1000])
    size = case.manifest["bytes"]
    with pytest.raises(ModelFileError, match=rf"ends at byte {size}, but the file has {size - 1000}: it is cut short"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "file: has 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "magic: is a Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "magic: is a web page"),
        (b"PK\x03\x04" + bytes(60), "magic: is a zip or PyTorch file"),
    ],
)
def test_what_people_take_for_a_model(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        open_gguf(saved(tmp_path, content))


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none\.gguf: file: No such file or directory"):
        open_gguf(str(tmp_path / "none.gguf"))
    with pytest.raises(ModelFileError, match="file: is a folder"):
        open_gguf(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="file: is not a regular file"):
        open_gguf(str(tmp_path / "pipe"))
    with pytest.raises(ModelFileError, match="file: "):
        open_gguf("a\0b")


def test_control_characters_of_a_key_do_not_reach_the_message(tmp_path: Path) -> None:
    draft = with_key("two\nlines\x1b[31m" + "x" * 500, Raw(BOOL, b"\2"))
    with pytest.raises(ModelFileError, match=r"two\\x0alines\\x1b\[31mx+…: a boolean") as caught:
        open_gguf(draft.write(tmp_path))
    assert len(str(caught.value)) < 300


def saved(folder: Path, content: bytes) -> str:
    (folder / "model.gguf").write_bytes(content)
    return str(folder / "model.gguf")
