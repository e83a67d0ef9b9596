"""Reads the header of a GGUF file, version 2 or 3, little endian: metadata, then tensor infos; the weights stay mapped.

Nothing in the file is believed: each length is held against the file's end before it is used, counts have limits, and
arrays are walked once to find their end but not read, so that time and memory are bounded by the file's own size.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
import stat
import struct
from mmap import ACCESS_READ, mmap

import numpy as np

from engine.errors import ModelFileError
from engine.gguf.cursor import Cursor
from engine.gguf.file import GgufFile, TensorInfo
from engine.gguf.quants import QUANTS, QuantType, quant_name
from engine.gguf.values import SCALARS, UINT32, UINT64, ArrayValue, Value, ValueType, printable

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
_HEADER = struct.Struct("<4sIQQ")
_SMALLEST_KEY = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
_FOREIGN = {
    b"version https://": "is a Git LFS pointer, not the model itself: fetch it with `git lfs pull`",
    b"<!DOCTYPE html": "is a web page, not a model: the download went wrong",
    b"<html": "is a web page, not a model: the download went wrong",
    b"PK\x03\x04": "is a zip or PyTorch file, not GGUF",
}


def open_gguf(path: str, fd: int | None = None) -> GgufFile:
    """Map `path` (or the open descriptor `fd`, which stays the caller's) and read its header.

    Raises ModelFileError naming file and field when it cannot be opened, is damaged, foreign or not supported.
    """
    buffer = _map(path, fd)
    cursor = Cursor(path, buffer, len(buffer))
    version, tensor_count, key_count = _read_preamble(cursor)
    metadata = _read_metadata(cursor, key_count)
    _refuse_split(path, metadata)
    tensors = _read_tensors(cursor, tensor_count, _alignment(path, metadata))
    view = np.frombuffer(buffer, np.uint8)
    return GgufFile(path, len(buffer), version, metadata, tensors, view)


def _map(path: str, fd: int | None) -> mmap:
    try:
        # Non-blocking: a named pipe must be refused below, not waited for.
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK) if fd is None else fd
    except (OSError, ValueError) as error:
        raise ModelFileError(printable(path, 4096), "file", _reason(error)) from None
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ModelFileError(path, "file", f"is {kind}, expected a GGUF file")
        if status.st_size < _HEADER.size:
            raise ModelFileError(path, "file", f"has {status.st_size} bytes, too few for a GGUF file")
        return mmap(opened, status.st_size, access=ACCESS_READ)
    except OSError as error:
        raise ModelFileError(path, "file", _reason(error)) from None
    finally:
        if fd is None:
            os.close(opened)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _read_preamble(cursor: Cursor) -> tuple[int, int, int]:
    """Magic and version; returns (version, tensor count, key count) with the counts possible in this file."""
    magic, version, tensor_count, key_count = _HEADER.unpack_from(cursor.buffer, cursor.take(_HEADER.size, "header"))
    if magic != b"GGUF":
        start = cursor.buffer[:16]
        problem = next((text for begin, text in _FOREIGN.items() if start.startswith(begin)), None)
        cursor.fail("magic", problem or f"is {magic!r}, expected b'GGUF': this is not a GGUF file")
    if version & 0xFFFF == 0:
        cursor.fail("version", "the file is big-endian; only little-endian files are supported")
    if version not in (2, 3):
        cursor.fail("version", f"GGUF version {version} is not supported; supported: 2, 3")
    for field, count, limit, smallest in (
        ("tensor count", tensor_count, MAX_TENSORS, _SMALLEST_TENSOR),
        ("metadata key count", key_count, MAX_KEYS, _SMALLEST_KEY),
    ):
        if count > min(limit, cursor.remaining // smallest):
            cursor.fail(field, f"{count} is more than a file of {cursor.size} bytes can hold or the limit of {limit}")
    return version, tensor_count, key_count


def _read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for number in range(count):
        key = cursor.text(f"metadata key {number + 1} of {count}")
        if key in metadata:
            cursor.fail(key, "this metadata key is there twice")
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: Cursor, key: str) -> Value:
    kind = _value_type(cursor, key)
    if kind is ValueType.STRING:
        return cursor.text(key)
    if kind is ValueType.ARRAY:
        return _read_array(cursor, key)
    value: int | float = cursor.number(SCALARS[kind], key)
    if kind is ValueType.BOOL:
        if value not in (0, 1):
            cursor.fail(key, f"a boolean is {value}, expected 0 or 1")
        return bool(value)
    return value


def _value_type(cursor: Cursor, key: str) -> ValueType:
    number = cursor.number(UINT32, key)
    if number not in ValueType._value2member_map_:
        cursor.fail(key, f"value type {number} is unknown")
    return ValueType(number)


def _read_array(cursor: Cursor, key: str) -> ArrayValue:
    """Keep where the array starts and step over it."""
    kind = _value_type(cursor, key)
    length: int = cursor.number(UINT64, key)
    if kind is ValueType.ARRAY:
        cursor.fail(key, "an array of arrays is not supported")
    start = cursor.position
    if kind is ValueType.STRING:
        _skip_strings(cursor, key, length)
    else:
        cursor.take(length * SCALARS[kind].size, key)
    return ArrayValue(cursor.path, key, kind, length, start, cursor.buffer)


def _skip_strings(cursor: Cursor, key: str, count: int) -> None:
    """The one hot loop of the reader: a vocabulary has several 100,000 strings, so bounds are checked by the slice.

    Each turn moves on by 8 bytes or more and one past the end fails to unpack, so it ends within remaining / 8 turns.
    """
    if count > cursor.remaining // UINT64.size:
        cursor.fail(key, f"{count} strings are announced, more than the rest of the file can hold")
    buffer, position, length_at = cursor.buffer, cursor.position, UINT64.unpack_from
    try:
        for _ in range(count):
            position += length_at(buffer, position)[0] + 8
    except (struct.error, OverflowError):  # the position left the file, or even the machine's integers
        position = cursor.size + 1
    cursor.take(position - cursor.position, key)


def _alignment(path: str, metadata: dict[str, Value]) -> int:
    value = metadata.get("general.alignment", 32)
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value.bit_count() != 1
        or not 0 < value <= MAX_ALIGNMENT
    ):
        problem = f"{printable(repr(value))} is not a power of two from 1 to {MAX_ALIGNMENT}"
        raise ModelFileError(path, "general.alignment", problem)
    return value


def _refuse_split(path: str, metadata: dict[str, Value]) -> None:
    count = metadata.get("split.count", 0)
    if count not in (0, 1):
        mend = "join the parts first with `llama-gguf-split --merge`"
        raise ModelFileError(
            path, "split.count", f"the model is split into {count} files, which is not supported: {mend}"
        )


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """Tensor infos with offsets made absolute; none leaves the file, overlaps another or is misaligned."""
    relative: dict[str, TensorInfo] = {}
    for number in range(count):
        info = _read_tensor(cursor, f"tensor {number + 1} of {count}")
        if info.name in relative:
            cursor.fail(info.name, "this tensor is there twice")
        if info.offset % alignment:
            cursor.fail(info.name, f"offset {info.offset} is not a multiple of the alignment {alignment}")
        relative[info.name] = info
    start = -(-cursor.position // alignment) * alignment
    return _place(cursor, start, relative)


def _read_tensor(cursor: Cursor, field: str) -> TensorInfo:
    name = cursor.text(field)
    field = f"tensor {name}"
    dimensions = cursor.number(UINT32, field)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        cursor.fail(field, f"has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    sizes: list[int] = [cursor.number(UINT64, field) for _ in range(dimensions)]
    type_number: int = cursor.number(UINT32, field)
    offset: int = cursor.number(UINT64, field)
    if type_number not in QUANTS:
        supported = ", ".join(quant.name for quant in QUANTS)
        cursor.fail(field, f"quantisation {quant_name(type_number)} is not supported; supported: {supported}")
    quant = QuantType(type_number)
    spec = QUANTS[quant]
    if 0 in sizes or sizes[0] % spec.block_elements:
        cursor.fail(
            field, f"shape {sizes} does not fit {quant.name}, whose rows are multiples of {spec.block_elements}"
        )
    nbytes = math.prod(sizes) // spec.block_elements * spec.block_bytes
    return TensorInfo(name, tuple(reversed(sizes)), quant, offset, nbytes)


def _place(cursor: Cursor, start: int, relative: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Add `start` to every offset. Keeps the file's order of names; checks neighbours in order of offset."""
    end, previous = 0, ""
    for info in sorted(relative.values(), key=lambda info: info.offset):
        if info.offset < end:
            cursor.fail(f"tensor {info.name}", f"overlaps tensor {printable(previous)}")
        end, previous = info.offset + info.nbytes, info.name
        if start + end > cursor.size:
            problem = f"ends at byte {start + end}, but the file has {cursor.size}: it is cut short or damaged"
            cursor.fail(f"tensor {info.name}", problem)
    return {
        info.name: TensorInfo(info.name, info.shape, info.quant, start + info.offset, info.nbytes)
        for info in relative.values()
    }
