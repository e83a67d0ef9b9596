from engine.plan.costs import COSTS, MIB, captured_rows, graph_bytes


def test_every_decode_batch_has_a_captured_row_count():
    assert captured_rows(64) == [1, 2, 4, 8, 16, 32, 64]
    assert captured_rows(1) == [1]
    assert captured_rows(33)[-1] == 64


def test_graphs_cost_what_was_measured():
    """32 graphs of 300 kernel nodes: 26 MiB."""
    graphs = len(captured_rows(256))
    nodes = graph_bytes(COSTS, layers=25, max_batch=64, samples=False)
    assert abs(nodes / graphs - 26 * MIB / 32) < 1000
    assert graph_bytes(COSTS, layers=25, max_batch=64, samples=True) > nodes


def test_rounding_is_up():
    assert COSTS.granules(1) == COSTS.granule
    assert COSTS.granules(COSTS.granule) == COSTS.granule
    assert COSTS.granules(0) == 0
