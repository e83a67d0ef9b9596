import numpy as np

from engine.ops.cpu.memory import Results, aligned_empty


def test_rows_begin_at_cache_lines():
    for shape, dtype in (((3, 16), np.float32), ((5, 64), np.int8), ((1,), np.float32)):
        array = aligned_empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.ctypes.data % 64 == 0


def test_memory_is_taken_again_only_when_nobody_holds_it():
    results = Results()
    first = results.take(4, 32)
    address = first.ctypes.data
    assert first.shape == (4, 32)
    second = results.take(4, 32)
    assert second.ctypes.data != address
    del first
    third = results.take(3, 32)
    assert third.ctypes.data == address
    row = third[1:2]
    del third
    assert results.take(4, 32).ctypes.data != address
    turned = row.reshape(2, 16).T
    del row
    assert results.take(4, 32).ctypes.data != address
    del turned
    assert results.take(4, 32).ctypes.data == address


def test_a_larger_result_takes_the_place_of_idle_smaller_ones():
    results = Results()
    kept = results.take(1, 16)
    results.take(1, 16)
    large = results.take(100, 16)
    assert large.shape == (100, 16)
    address = large.ctypes.data
    del large
    assert results.take(2, 16).ctypes.data == address
    assert kept.shape == (1, 16)
