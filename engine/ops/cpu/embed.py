"""embed: the rows of an embedding matrix that belong to token ids, unpacked to float32."""

import numpy as np
import numpy.typing as npt

from engine.ops.cpu.compiled import kernel
from engine.ops.cpu.lanes import LANES, fma, load_codes, splat_at, store
from engine.ops.cpu.linear import Matrix

Floats = npt.NDArray[np.float32]


@kernel()
def _embed(tokens, codes, scales, offsets, offset_step, shift, out):  # type: ignore[no-untyped-def]
    cols = codes.shape[2]
    groups = cols >> shift
    for m in range(len(tokens)):
        for k in range(0, cols, LANES):
            g = tokens[m] * groups + (k >> shift)
            scale, offset = splat_at(scales, g), splat_at(offsets, g * offset_step)
            store(out, m * cols + k, fma(load_codes(codes, tokens[m] * cols + k), scale, offset))


def embed(tokens: npt.NDArray[np.int64], table: Matrix, out: Floats) -> None:
    """tokens int64 [rows], each below the table's rows; out float32 [rows, cols]."""
    assert out.shape == (len(tokens), table.shape[2])
    assert len(tokens) == 0 or (tokens.min() >= 0 and tokens.max() < table.shape[1])
    if table.codes is not None:
        _embed(tokens, table.codes, table.scales, table.offsets, table.offset_step, table.shift, out)
    else:
        assert table.values is not None
        np.take(table.values[0], tokens, axis=0, out=out)
