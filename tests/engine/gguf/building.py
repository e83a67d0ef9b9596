"""Writes small GGUF files, sound ones and deliberately broken ones, for the tests of everything that reads them."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.gguf import ArrayValue, GgufFile, ValueType
from engine.gguf.quants import QuantType
from engine.gguf.values import SCALARS

ALIGNMENT = 32


@dataclass(frozen=True)
class Raw:
    """A metadata value given as type number and bytes, however wrong."""

    kind: int
    payload: bytes


@dataclass
class Tensor:
    """One tensor. `shape` is in NumPy's order; the other fields override what would be right."""

    shape: Sequence[int]
    quant: int = QuantType.F32
    data: bytes = b""
    offset: int | None = None
    dimensions: int | None = None


@dataclass
class Draft:
    """A GGUF file to be; change what a test is about, then `write` it. `counts` are (tensors, keys) if not the real."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    magic: bytes = b"GGUF"
    version: int = 3
    counts: tuple[int | None, int | None] = (None, None)

    def header(self) -> bytes:
        tensor_count, key_count = self.counts
        parts = [
            self.magic,
            struct.pack("<I", self.version),
            struct.pack("<Q", len(self.tensors) if tensor_count is None else tensor_count),
            struct.pack("<Q", len(self.metadata) if key_count is None else key_count),
        ]
        parts += [text(key) + value(given) for key, given in self.metadata.items()]
        position = 0
        for name, tensor in self.tensors.items():
            parts.append(tensor_info(name, tensor, position))
            position += padded(len(tensor.data))
        return b"".join(parts)

    def image(self) -> bytes:
        head = self.header()
        data = b"".join(t.data.ljust(padded(len(t.data)), b"\0") for t in self.tensors.values())
        return head.ljust(padded(len(head)), b"\0") + data

    def write(self, folder: Path, name: str = "model.gguf") -> str:
        path = folder / name
        path.write_bytes(self.image())
        return str(path)


def small_draft() -> Draft:
    """A sound file with a value of every type and two tensors."""
    metadata = {f"scalar.{kind.name.lower()}": Raw(kind, SCALARS[kind].pack(1)) for kind in SCALARS}
    metadata |= {"text": "grüße", "numbers": [1, -2, 3], "texts": ["", "a", "ö"], "general.alignment": ALIGNMENT}
    tensors = {
        "a.weight": Tensor((2, 3), data=bytes(24)),
        "b.weight": Tensor((2, 32), QuantType.Q4_0, bytes(36)),
    }
    return Draft(metadata, tensors)


def draft_of(gguf: GgufFile) -> Draft:
    """The same file again, to change one thing in it."""
    metadata: dict[str, Any] = {}
    for key, found in gguf.metadata.items():
        if isinstance(found, ArrayValue):
            metadata[key] = found.strings() if found.element_type is ValueType.STRING else found.numbers().tolist()
        else:
            metadata[key] = found
    tensors = {
        name: Tensor(info.shape, info.quant, gguf.tensor_bytes(name).tobytes()) for name, info in gguf.tensors.items()
    }
    return Draft(metadata, tensors)


def padded(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


def text(content: str | bytes) -> bytes:
    raw = content if isinstance(content, bytes) else content.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(given: Any) -> bytes:
    if isinstance(given, Raw):
        return struct.pack("<I", given.kind) + given.payload
    if isinstance(given, list):
        strings = bool(given) and isinstance(given[0], str)
        kind = ValueType.STRING if strings else ValueType.FLOAT32 if _any_float(given) else ValueType.INT32
        body = b"".join(text(item) if strings else SCALARS[kind].pack(item) for item in given)
        return struct.pack("<IIQ", ValueType.ARRAY, kind, len(given)) + body
    if isinstance(given, str):
        return struct.pack("<I", ValueType.STRING) + text(given)
    kind = {bool: ValueType.BOOL, int: ValueType.UINT32, float: ValueType.FLOAT32}[type(given)]
    return struct.pack("<I", kind) + SCALARS[kind].pack(given)


def array(kind: int, length: int, payload: bytes = b"") -> Raw:
    """An array that announces `length` elements and holds `payload`."""
    return Raw(ValueType.ARRAY, struct.pack("<IQ", kind, length) + payload)


def tensor_info(name: str | bytes, tensor: Tensor, position: int) -> bytes:
    sizes = list(reversed(tensor.shape))
    dimensions = len(sizes) if tensor.dimensions is None else tensor.dimensions
    offset = position if tensor.offset is None else tensor.offset
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", dimensions, *sizes, tensor.quant, offset)


def _any_float(items: Sequence[Any]) -> bool:
    return any(isinstance(item, float) for item in items)
