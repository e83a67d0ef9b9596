from itertools import pairwise

import pytest

from engine.plan.costs import COSTS, MIB
from engine.plan.graphs import GraphKeys, captured_rows


def test_every_decode_batch_has_a_captured_row_count():
    assert captured_rows(64) == (1, 2, 4, 8, 16, 32, 64)
    assert captured_rows(1) == (1,)
    assert captured_rows(33)[-1] == 64


def test_graphs_cost_what_was_measured():
    """32 graphs of 300 kernel nodes: 26 MiB."""
    keys = GraphKeys.of(64, samples=False)
    graphs, nodes = len(keys.decode) + len(keys.tail), keys.nbytes(COSTS, 25)
    assert abs(nodes / graphs - 26 * MIB / 32) < 1000
    assert GraphKeys.of(64, samples=True).nbytes(COSTS, 25) > nodes


@pytest.mark.parametrize("max_batch", [1, 3, 64, 256])
def test_only_keys_that_a_larger_one_covers_can_go(max_batch):
    keys = GraphKeys.of(max_batch, samples=True)
    largest = [rows[-1] for rows in keys]
    sizes = [keys.nbytes(COSTS, 3)]
    while keys != (fewer := keys.halved()):
        for rows, left in zip(keys, fewer, strict=True):
            assert set(left) <= set(rows)
            for before, after in pairwise(rows):
                assert {before, after} & set(left)
        keys = fewer
        assert [rows[-1] for rows in keys] == largest
        sizes.append(keys.nbytes(COSTS, 3))
    assert sizes == sorted(sizes, reverse=True)
    assert keys == GraphKeys.of(max_batch, samples=True, few=True)
