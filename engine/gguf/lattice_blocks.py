"""Block formats of 256 weights whose codes name points of a table ("IQ" types), signs apart.

Each function takes structured blocks [n] and returns (codes, scale, offset) of the weights scale * code + offset:
codes [n, 256], scale float32 [n, groups]; there is no offset. The order of every product is the reference's, so that
results are equal to the bit. Format: ggml-common.h and ggml-quants.c of ggml.
"""

import numpy as np

from engine.gguf import lattices
from engine.gguf.small_blocks import NL_LEVELS, Array, Blocks, Parts, nibbles, widened

IQ4_XS = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])
IQ3_S = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)])
IQ3_XXS = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("signs_and_scales", "<u4", 8)])
IQ2_XS = np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])

_SIGN_SHIFTS = np.array([0, 7, 14, 21], np.uint32)
_HIGH_SHIFTS = np.arange(0, 16, 2, dtype=np.uint16)


def iq4_xs(blocks: Blocks) -> Parts:
    high = ((blocks["scales_h"][:, None] >> _HIGH_SHIFTS) & 3).astype(np.uint8)
    scales = (_in_turn(blocks["scales_l"]) | high << 4).astype(np.int8) - np.int8(32)
    codes = NL_LEVELS[nibbles(blocks["qs"].reshape(-1, 8, 16))]
    return codes, widened(blocks["d"]) * scales.astype(np.float32), None


def iq3_s(blocks: Blocks) -> Parts:
    ninth = np.unpackbits(blocks["qh"], axis=1, bitorder="little").astype(np.uint16)
    magnitudes = lattices.iq3_s_points()[blocks["qs"] | ninth << 8].reshape(-1, 256)
    minus = np.unpackbits(blocks["signs"], axis=1, bitorder="little").view(np.int8)
    scale = widened(blocks["d"]) * (1 + 2 * _in_turn(blocks["scales"])).astype(np.float32)
    return magnitudes * (1 - 2 * minus), scale, None


def iq3_xxs(blocks: Blocks) -> Parts:
    words = blocks["signs_and_scales"]
    magnitudes = lattices.iq3_xxs_points()[blocks["qs"]].reshape(-1, 256)
    signs = lattices.signs()[(words[:, :, None] >> _SIGN_SHIFTS) & 127].reshape(-1, 256)
    scale = widened(blocks["d"]) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return magnitudes * signs, scale, None


def iq2_xs(blocks: Blocks) -> Parts:
    codes = lattices.iq2_xs_points()[blocks["qs"] & 511] * lattices.signs()[blocks["qs"] >> 9]
    steps = _in_turn(blocks["scales"]).astype(np.float32)
    return codes, widened(blocks["d"]) * (np.float32(0.5) + steps) * np.float32(0.25), None


def _in_turn(packed: Array) -> Array:
    """[n, k] bytes to [n, 2k] nibbles: low half, high half, of each byte in turn."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)
