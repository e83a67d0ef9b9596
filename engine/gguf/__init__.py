"""Bounded GGUF reader and dequantiser; NumPy only, so that the service may import it."""

from engine.gguf.file import GgufFile, TensorInfo
from engine.gguf.reader import open_gguf
from engine.gguf.values import ArrayValue, Value, ValueType

__all__ = ["ArrayValue", "GgufFile", "TensorInfo", "Value", "ValueType", "open_gguf"]
