import resource

import numpy as np
import pytest

from engine.kv_cache.storage import allocate_kv, kv_token_bytes


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8"])
def test_layout_and_bytes(dtype):
    kv = allocate_kv(dtype, 3, 5, 2, 40)
    assert kv.data.shape == (3, 2, 5, 2, 64, 40)
    assert kv.blocks == 5
    assert kv.data.flags.writeable
    assert kv.data.ctypes.data % 64 == 0
    assert not kv.data.any()
    assert kv.data.nbytes + kv.scales.nbytes == kv_token_bytes(dtype, 3, 2, 40) * 5 * 64


def test_memory_is_taken_when_touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kv = allocate_kv("f32", 32, 256, 8, 128)
    assert kv.data.nbytes == 4 << 30
    kv.data[:, :, 7, :, 3] = np.float32(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_what_the_system_refuses_is_named():
    with pytest.raises(MemoryError, match=r"\d+ bytes for keys and values"):
        allocate_kv("f32", 1 << 10, 1 << 24, 128, 256)
