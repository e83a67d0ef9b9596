"""A position in a GGUF header; the one place that holds announced lengths against the end of the file."""

import struct
from dataclasses import dataclass
from mmap import mmap
from typing import Any, NoReturn

from engine.errors import ModelFileError
from engine.gguf.values import UINT64, printable

MAX_HEADER_BYTES = 128 << 20
"""Vocabularies of 300k tokens take 10 MB; a header beyond this is a crafted one, and would only cost time."""


@dataclass(slots=True)
class Cursor:
    """A position in the header that never passes the end of the file."""

    path: str
    buffer: mmap
    size: int
    position: int = 0

    @property
    def remaining(self) -> int:
        return min(self.size, MAX_HEADER_BYTES) - self.position

    def take(self, count: int, field: str) -> int:
        """Advance over `count` bytes and return where they start."""
        if count > self.remaining:
            where = (
                "the file ends" if count > self.size - self.position else f"the limit of {MAX_HEADER_BYTES} bytes is"
            )
            self.fail(field, f"{count} bytes from byte {self.position} on are announced, but {where} before that")
        start = self.position
        self.position += count
        return start

    def number(self, kind: struct.Struct, field: str) -> Any:
        return kind.unpack_from(self.buffer, self.take(kind.size, field))[0]

    def text(self, field: str) -> str:
        length = self.number(UINT64, field)
        start = self.take(length, field)
        try:
            return str(self.buffer[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(field, f"is not UTF-8 ({error.reason} at byte {start + error.start})")

    def fail(self, field: str, problem: str) -> NoReturn:
        raise ModelFileError(self.path, printable(field), problem)
