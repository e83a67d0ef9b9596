import numpy as np
import pytest

from engine.kv_cache.pieces import KvPieces
from engine.kv_cache.storage import STORED, allocate_kv


def filled(dtype, split, blocks=4):
    """Storages of 3 layers over stages, all bytes different by place and the same for every split."""
    stages = [allocate_kv(dtype, layers, blocks, 2, 8) for layers in split]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (3, *stages[0].data.view(np.uint8).shape[1:]), dtype=np.uint8)
    scales = rng.integers(0, 1 << 16, (3, *stages[0].scales.shape[1:]), dtype=np.uint16)
    first = 0
    for stage in stages:
        stage.data.view(np.uint8)[:] = data[first : first + len(stage.data)]
        stage.scales[:] = scales[first : first + len(stage.data)]
        first += len(stage.data)
    return stages


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("split", [(3,), (1, 2), (1, 1, 1)])
def test_a_block_is_the_same_bytes_over_any_split_and_comes_back_whole(dtype, split):
    here, whole = filled(dtype, split), filled(dtype, (3,))
    pieces, other = KvPieces(here), KvPieces(whole)
    assert (pieces.shape, pieces.piece_bytes) == (other.shape, other.piece_bytes)
    assert pieces.piece_bytes * 4 == sum(stage.data.nbytes + stage.scales.nbytes for stage in here)
    out, same = (np.zeros((2, pieces.piece_bytes), np.uint8) for _ in range(2))
    pieces.read([3, 1], out)
    other.read([3, 1], same)
    assert out.any()
    np.testing.assert_array_equal(out, same)
    pieces.write([0, 2], out)
    for stage in here:
        for values in (stage.data.view(np.uint8), stage.scales):
            np.testing.assert_array_equal(values[:, :, 0], values[:, :, 3])
            np.testing.assert_array_equal(values[:, :, 2], values[:, :, 1])


def test_another_type_or_shape_is_told_by_the_name():
    storages = [allocate_kv("f32", 3, 2, 2, 8), allocate_kv("f32", 3, 2, 4, 4), allocate_kv("int8", 3, 2, 2, 8)]
    assert len({KvPieces([storage]).shape for storage in storages}) == 3
