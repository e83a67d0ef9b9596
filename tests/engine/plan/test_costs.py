from engine.plan.costs import COSTS


def test_rounding_is_up():
    assert COSTS.granules(1) == COSTS.granule
    assert COSTS.granules(COSTS.granule) == COSTS.granule
    assert COSTS.granules(0) == 0
