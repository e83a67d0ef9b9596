"""Rows of the re-laid embedding table, and a whole matrix expanded to f16: the wrapper of embed.cu."""

import ctypes
from typing import Any

from engine.ops.cuda.compile import Unit
from engine.ops.cuda.launch import Array, Kernels, Pointer, address
from engine.ops.cuda.layout import Format
from engine.ops.cuda.weight import Weight, WeightsStruct

_WARPS = 4


class EmbedArgs(ctypes.Structure):
    """`EmbedArgs` of embed.cu."""

    _fields_ = (
        ("w", WeightsStruct),
        ("tokens", Pointer),
        ("y", Pointer),
        ("k", ctypes.c_int32),
        ("ldy", ctypes.c_int32),
    )


def unit(form: Format) -> Unit:
    return Unit.of("embed.cu", form.defines() | {"ARGS_BYTES": ctypes.sizeof(EmbedArgs)})


class Embed:
    """Both kernels for one format."""

    def __init__(self, kernels: Kernels, form: Format) -> None:
        self._form = form
        self._kernels = kernels.load(unit(form))

    def __call__(self, table: Weight, tokens: Array, y: Array, stream: Any) -> None:
        """y f32 [m, k] = rows `tokens` int32 [m] of `table`. Raises ValueError."""
        assert table.form is self._form
        m = int(tokens.shape[0])
        args = EmbedArgs(
            table.struct,
            address(tokens, "int32", (m,), "tokens"),
            address(y, "float32", (m, table.k), "y"),
            table.k,
            table.k,
        )
        self._kernels["embed"].launch((m, 1, 1), _WARPS * 32, args, stream)

    def expand(self, w: Weight, y: Array, stream: Any) -> None:
        """y f16 [rows, ldy] = the weights of `w`, zeros up to ldy (a multiple of 8, at most k padded)."""
        assert w.form is self._form
        assert not w.gated
        assert y.shape[1] % 8 == 0
        args = EmbedArgs(w.struct, Pointer(None), address(y, "float16", (w.rows, None), "y"), w.k, y.shape[1])
        grid = -(-int(w.records.shape[2]) // _WARPS), w.tiles, 1
        self._kernels["expand"].launch(grid, _WARPS * 32, args, stream)
