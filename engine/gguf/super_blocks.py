"""Block formats of 256 weights ("K" types): groups of 16 or 32 with small integer scales under one or two float16.

Each function takes structured blocks [n] and returns (codes, scale, offset) of the weights scale * code + offset:
codes [n, 256], scale and offset float32 [n, groups]. The order of every product is the reference's, so that results
are equal to the bit. Format: ggml-common.h and ggml-quants.c of ggml.
"""

import numpy as np

from engine.gguf.small_blocks import Array, Blocks, Parts, nibbles, widened

Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
Q3_K = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])

_PAIR_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]
_BIT_SHIFTS = np.arange(8, dtype=np.uint8)[:, None]


def q2_k(blocks: Blocks) -> Parts:
    scales = blocks["scales"]
    scale = widened(blocks["d"]) * (scales & 15).astype(np.float32)
    offset = -(widened(blocks["dmin"]) * (scales >> 4).astype(np.float32))
    return _bit_pairs(blocks["qs"]), scale, offset


def q3_k(blocks: Blocks) -> Parts:
    high = (blocks["hmask"][:, None, :] >> _BIT_SHIFTS) & 1
    codes = (_bit_pairs(blocks["qs"]).reshape(-1, 8, 32) | high << 2).view(np.int8)
    codes -= 4
    low_bits = nibbles(blocks["scales"][:, :8]).reshape(-1, 16)
    high_bits = ((blocks["scales"][:, None, 8:] >> _PAIR_SHIFTS) & 3).reshape(-1, 16)
    scales = (low_bits | high_bits << 4).astype(np.int8) - np.int8(32)
    return codes, widened(blocks["d"]) * scales.astype(np.float32), None


def q4_k(blocks: Blocks) -> Parts:
    scale, offset = _scales_and_minima(blocks)
    return nibbles(blocks["qs"].reshape(-1, 4, 32)), scale, offset


def q5_k(blocks: Blocks) -> Parts:
    scale, offset = _scales_and_minima(blocks)
    fifth = (blocks["qh"][:, None, :] >> _BIT_SHIFTS) & 1
    return nibbles(blocks["qs"].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth << 4, scale, offset


def q6_k(blocks: Blocks) -> Parts:
    low = nibbles(blocks["ql"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = (blocks["qh"].reshape(-1, 2, 1, 32) >> _PAIR_SHIFTS) & 3
    codes = (low | high << 4).view(np.int8)
    codes -= 32
    return codes, widened(blocks["d"]) * blocks["scales"].astype(np.float32), None


def _bit_pairs(packed: Array) -> Array:
    """[n, 64] bytes to [n, 2, 4, 32]: each half of 32 bytes holds four runs of 32 weights, two bits each."""
    return (packed.reshape(-1, 2, 1, 32) >> _PAIR_SHIFTS) & 3


def _scales_and_minima(blocks: Blocks) -> tuple[Array, Array]:
    """float32 [n, 8] each. Twelve bytes hold 8 scales and 8 minima of 6 bits: the first four of each in bytes 0-3 and
    4-7, the low nibbles of the last four in bytes 8-11, their top bits above the first four."""
    first, second, nibble = np.split(blocks["scales"], 3, axis=1)
    scales = np.concatenate((first & 63, nibble & 15 | (first >> 6) << 4), axis=1)
    minima = np.concatenate((second & 63, nibble >> 4 | (second >> 6) << 4), axis=1)
    scale = widened(blocks["d"]) * scales.astype(np.float32)
    return scale, -(widened(blocks["dmin"]) * minima.astype(np.float32))
