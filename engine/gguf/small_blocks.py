"""Block formats of 32 weights: one scale, sometimes one minimum, and 4, 5 or 8 bits a weight.

Each function takes structured blocks [n] of the layout beside it and returns (codes, scale, offset) of the weights
scale * code + offset: codes [n, 32] (int8 or uint8 below 128), scale and offset float32 [n, 1]; offset None means none.
A nibble array holds weight j in the low and weight j + 16 in the high half of byte j.
Format: ggml-common.h and ggml-quants.c of ggml.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.void]
Array = npt.NDArray[Any]
Parts = tuple[Array, Array, Array | None]

Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
MXFP4 = np.dtype([("e", "u1"), ("qs", "u1", 16)])
IQ4_NL = Q4_0

NL_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""The sixteen levels of IQ4_NL and IQ4_XS."""
FP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the sixteen values of E2M1; the scale is halved in return."""


def nibbles(packed: Array) -> Array:
    """[..., k] bytes to [..., 2, k]: low halves, then high halves."""
    whole = np.ascontiguousarray(packed)  # one pass over strided bytes, then vector instructions
    return np.stack((whole & 15, whole >> 4), axis=-2)


def widened(half: Array) -> Array:
    """float16 [n] to float32 [n, 1]."""
    return half.astype(np.float32)[:, None]


def q4_0(blocks: Blocks) -> Parts:
    codes = nibbles(blocks["qs"]).view(np.int8)
    codes -= 8
    return codes, widened(blocks["d"]), None


def q4_1(blocks: Blocks) -> Parts:
    return nibbles(blocks["qs"]), widened(blocks["d"]), widened(blocks["m"])


def q5_0(blocks: Blocks) -> Parts:
    codes = _five_bits(blocks).view(np.int8)
    codes -= 16
    return codes, widened(blocks["d"]), None


def q5_1(blocks: Blocks) -> Parts:
    return _five_bits(blocks), widened(blocks["d"]), widened(blocks["m"])


def q8_0(blocks: Blocks) -> Parts:
    return blocks["qs"], widened(blocks["d"]), None


def iq4_nl(blocks: Blocks) -> Parts:
    return NL_LEVELS[nibbles(blocks["qs"])], widened(blocks["d"]), None


def mxfp4(blocks: Blocks) -> Parts:
    """Scale 2^(e - 128): half of E8M0's 2^(e - 127). The two smallest are float32 subnormals."""
    exponent = blocks["e"].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - 1) << 23)
    return FP4_LEVELS[nibbles(blocks["qs"])], bits.view(np.float32)[:, None], None


def _five_bits(blocks: Blocks) -> Array:
    fifth = np.unpackbits(blocks["qh"], axis=1, bitorder="little").reshape(-1, 2, 16)
    codes: Array = nibbles(blocks["qs"]) | fifth << 4
    return codes
