"""The value types of GGUF metadata, and arrays kept as an offset into the mapped file."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ModelFileError

UINT32 = struct.Struct("<I")
UINT64 = struct.Struct("<Q")


class ValueType(IntEnum):
    """Type numbers of the GGUF specification."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS: dict[ValueType, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: UINT32,
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.UINT64: UINT64,
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}


def printable(name: str, limit: int = 80) -> str:
    """`name` as one line of plain characters, however the file spells it; cut to `limit`."""
    plain = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in name[:limit])
    return plain + "…" if len(name) > limit else plain


@dataclass(frozen=True, slots=True, eq=False)
class ArrayValue:
    """An array of numbers or strings left in the file until it is asked for. The reader has checked its bounds."""

    path: str
    key: str
    element_type: ValueType
    length: int
    offset: int
    """Byte in the file of the first element."""
    _buffer: mmap = field(repr=False)

    def __len__(self) -> int:
        return self.length

    def numbers(self) -> npt.NDArray[Any]:
        """Read-only view [length] in the file's own type (bool for BOOL). Raises ModelFileError for strings."""
        if self.element_type is ValueType.STRING:
            raise ModelFileError(self.path, printable(self.key), "is an array of strings, expected numbers")
        dtype = np.dtype(SCALARS[self.element_type].format)
        values = np.frombuffer(self._buffer, dtype, self.length, self.offset)
        return values != 0 if self.element_type is ValueType.BOOL else values

    def raw_strings(self) -> list[bytes]:
        """The strings as the file's bytes. Raises ModelFileError for numbers."""
        return list(self._each_string())

    def strings(self) -> list[str]:
        """The strings. Raises ModelFileError for numbers, and for one that is not UTF-8."""
        try:
            return [str(raw, "utf-8") for raw in self._each_string()]
        except UnicodeDecodeError as error:
            raise ModelFileError(
                self.path, printable(self.key), f"holds a string that is not UTF-8 ({error})"
            ) from None

    def _each_string(self) -> Iterator[bytes]:
        if self.element_type is not ValueType.STRING:
            raise ModelFileError(self.path, printable(self.key), "is an array of numbers, expected strings")
        buffer, position, length_at = self._buffer, self.offset, UINT64.unpack_from
        for _ in range(self.length):
            start = position + 8
            position = start + length_at(buffer, position)[0]
            yield buffer[start:position]


Value = int | float | bool | str | ArrayValue
