"""The tokens that a forward reads: the wrapper of feed.cu."""

import ctypes
from typing import Any

from engine.ops.cuda.compile import Unit
from engine.ops.cuda.launch import Array, Kernels, Pointer, address


class FeedArgs(ctypes.Structure):
    """`FeedArgs` of feed.cu."""

    _fields_ = (
        ("tokens", Pointer),
        ("slots", Pointer),
        ("last_tokens", Pointer),
        ("fed", Pointer),
        ("m", ctypes.c_int32),
    )


UNIT = Unit.of("feed.cu", {"ARGS_BYTES": ctypes.sizeof(FeedArgs)})
_THREADS = 256


class Feed:
    def __init__(self, kernels: Kernels) -> None:
        self._kernel = kernels.load(UNIT)["feed"]

    def __call__(self, tokens: Array, slots: Array, last_tokens: Array, fed: Array, stream: Any) -> None:
        """fed int32 [m] = tokens int32 [m], or last_tokens int32 [slots] of the row's slot where that is -1.

        A row whose last sample failed reads token 0. Raises ValueError.
        """
        m = int(tokens.shape[0])
        args = FeedArgs(
            address(tokens, "int32", (m,), "tokens"),
            address(slots, "int32", (m,), "slots"),
            address(last_tokens, "int32", (None,), "last_tokens"),
            address(fed, "int32", (m,), "fed"),
            m,
        )
        self._kernel.launch((-(-m // _THREADS), 1, 1), _THREADS, args, stream)
