"""An opened GGUF file: metadata with typed getters, tensors as views of the mapped bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from engine.errors import ModelFileError
from engine.gguf.quants import Codes, QuantType, codes, dequantise
from engine.gguf.values import ArrayValue, Value, printable

Default = TypeVar("Default")
_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in NumPy's order: [rows, cols], or [experts, rows, cols]."""

    name: str
    shape: tuple[int, ...]
    quant: QuantType
    offset: int
    """Byte in the file."""
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """Made by `open_gguf`, which has checked every length and offset in it against the file's size.

    The mapping lives as long as this object or any view handed out by it.
    """

    path: str
    size: int
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    _bytes: npt.NDArray[np.uint8] = field(repr=False)

    def u32(self, key: str, default: Default = _REQUIRED) -> int | Default:
        """A count or id, whatever integer type holds it. Raises ModelFileError when absent, negative or wider."""
        value = self.metadata.get(key)
        if value is None:
            return self._absent(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(key, value, "a whole number")
        if not 0 <= value < 1 << 32:
            self.fail(key, f"{value} is outside 0 to {(1 << 32) - 1}")
        return value

    def f32(self, key: str, default: Default = _REQUIRED) -> float | Default:
        """A finite number. Raises ModelFileError when absent, NaN, infinite or of another type."""
        value = self.metadata.get(key)
        if value is None:
            return self._absent(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(key, value, "a number")
        if not math.isfinite(value):
            self.fail(key, f"{value} is not a finite number")
        return float(value)

    def text(self, key: str, default: Default = _REQUIRED) -> str | Default:
        """A string. Raises ModelFileError when absent or of another type."""
        value = self.metadata.get(key)
        if value is None:
            return self._absent(key, default)
        if not isinstance(value, str):
            self._refuse(key, value, "a string")
        return value

    def flag(self, key: str, default: Default = _REQUIRED) -> bool | Default:
        """A boolean. Raises ModelFileError when absent or of another type."""
        value = self.metadata.get(key)
        if value is None:
            return self._absent(key, default)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def array(self, key: str, default: Default = _REQUIRED) -> ArrayValue | Default:
        """An array. Raises ModelFileError when absent or of another type."""
        value = self.metadata.get(key)
        if value is None:
            return self._absent(key, default)
        if not isinstance(value, ArrayValue):
            self._refuse(key, value, "an array")
        return value

    def tensor(self, name: str) -> TensorInfo:
        """Raises ModelFileError when the file has no such tensor."""
        info = self.tensors.get(name)
        return info if info is not None else self.fail(name, "this tensor is missing")

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """Read-only uint8 view [nbytes] of the mapped file. Raises ModelFileError when the tensor is missing."""
        info = self.tensor(name)
        return self._bytes[info.offset : info.offset + info.nbytes]

    def dequantised(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32 [*shape]. Raises ModelFileError when it is missing or holds NaN or infinity."""
        info = self.tensor(name)
        values = dequantise(self.tensor_bytes(name), info.quant, info.shape)
        if not np.isfinite(values).all():
            self.fail(name, "holds NaN or infinity (the file is damaged)")
        return values

    def codes(self, name: str) -> Codes:
        """The tensor as integer codes. Raises ModelFileError when it is missing or a scale is NaN or infinity."""
        info = self.tensor(name)
        result = codes(self.tensor_bytes(name), info.quant, info.shape)
        offset_ok = result.offset is None or bool(np.isfinite(result.offset).all())
        if not (offset_ok and np.isfinite(result.scale).all()):
            self.fail(name, "holds NaN or infinity (the file is damaged)")
        return result

    def fail(self, field_name: str, problem: str) -> NoReturn:
        """Raise ModelFileError for this file."""
        raise ModelFileError(self.path, printable(field_name), printable(problem, 500))

    def _absent(self, key: str, default: Default) -> Default:
        return default if default is not _REQUIRED else self.fail(key, "this metadata key is missing")

    def _refuse(self, key: str, value: Value, expected: str) -> NoReturn:
        kind = "an array" if isinstance(value, ArrayValue) else printable(repr(value))
        self.fail(key, f"expected {expected}, found {kind}")
