"""Random bytes of every quantisation whose weights are sane: scales of the size that real files have."""

import numpy as np
import numpy.typing as npt

from engine.gguf.quants import QUANTS, QuantType


def random_matrix(quant: QuantType, rows: int, k: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Raw bytes of a matrix [rows, k] with weights of a magnitude around k ** -0.5."""
    rng = np.random.default_rng([seed, quant, rows, k])
    spec, size = QUANTS[quant], k**-0.5
    if not spec.group:
        weights = (rng.standard_normal((rows, k)) * size).astype(np.float32)
        if quant is QuantType.BF16:
            return (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
        return weights.astype(spec.layout).view(np.uint8).reshape(-1)
    assert k % spec.block_elements == 0
    blocks = rng.integers(0, 256, (rows * k // spec.block_elements, spec.block_bytes), dtype=np.uint8).view(spec.layout)
    blocks = blocks.reshape(-1)
    for name in ("d", "dmin", "m"):
        if name in spec.layout.names:
            blocks[name] = (rng.uniform(0.5, 1.0, len(blocks)) * rng.choice([-1, 1], len(blocks))).astype(np.float16)
    if "e" in spec.layout.names:
        blocks["e"] = rng.integers(118, 124, len(blocks))
        return blocks.view(np.uint8).reshape(-1)
    spread = _greatest_code(quant) * size
    blocks["d"] = (blocks["d"] * spread).astype(np.float16)
    for name in ("dmin", "m"):
        if name in spec.layout.names:
            blocks[name] = (blocks[name] * spread * 4).astype(np.float16)
    return blocks.view(np.uint8).reshape(-1)


def _greatest_code(quant: QuantType) -> float:
    """About one over the spread of scale * code at d = 1."""
    spreads = {
        "Q8_0": 75, "IQ4_NL": 70, "Q4_0": 5, "Q4_1": 5, "Q5_0": 9, "Q5_1": 9, "Q2_K": 10, "Q3_K": 40, "Q4_K": 180,
        "Q5_K": 360, "Q6_K": 1300, "IQ4_XS": 1200, "IQ3_S": 150, "IQ3_XXS": 130, "IQ2_XS": 60,
    }  # fmt: skip
    return 1 / spreads[quant.name]
