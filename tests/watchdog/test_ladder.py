"""Order, one climb at a time, cool-down, and the memory of empty rungs."""

from watchdog.actions import TRIMS, Rung, whole
from watchdog.ladder import Ladder, end, next_rung, remember, take
from watchdog.snapshot import MIB, Holdings

HOLDINGS = Holdings(generation=1, ledger={"pool_cached": 40 * MIB, "cuda_graphs": 100 * MIB})


def climb(ladder: Ladder, holdings: Holdings, returned: int = 0) -> tuple[Ladder, list[Rung]]:
    rungs: list[Rung] = []
    while (rung := next_rung(ladder, TRIMS, holdings)) is not None:
        ladder = remember(take(ladder, rung), rung, returned, holdings)
        rungs.append(rung)
    return end(ladder, 100.0), rungs


def test_rungs_come_in_order_of_cost_and_once_a_climb() -> None:
    _, rungs = climb(Ladder(), HOLDINGS)
    assert rungs == [Rung.POOLS, Rung.STACK_LIMIT, Rung.CUBLAS_WORKSPACE, Rung.GRAPH_CACHE, Rung.ELASTIC]


def test_a_rung_that_returned_nothing_twice_is_skipped() -> None:
    ladder, _ = climb(Ladder(), HOLDINGS)
    ladder, second = climb(ladder, HOLDINGS)
    assert second == list(TRIMS)
    ladder, third = climb(ladder, HOLDINGS)
    assert third == []


def test_until_its_owner_holds_something_else() -> None:
    ladder, _ = climb(climb(Ladder(), HOLDINGS)[0], HOLDINGS)
    more = Holdings(generation=1, ledger={"pool_cached": 60 * MIB, "cuda_graphs": 100 * MIB})
    assert climb(ladder, more)[1] == [Rung.POOLS]


def test_until_another_engine_runs() -> None:
    ladder, _ = climb(climb(Ladder(), HOLDINGS)[0], HOLDINGS)
    assert climb(ladder, Holdings(generation=2, ledger=HOLDINGS.ledger))[1] == list(TRIMS)


def test_a_rung_that_returned_something_is_asked_again() -> None:
    ladder = Ladder()
    for _ in range(5):
        ladder, rungs = climb(ladder, HOLDINGS, returned=4 * MIB)
        assert rungs == list(TRIMS)


def test_one_success_wipes_out_one_failure() -> None:
    ladder = remember(Ladder(), Rung.POOLS, 0, HOLDINGS)
    ladder = remember(ladder, Rung.POOLS, 8 * MIB, HOLDINGS)
    ladder = remember(ladder, Rung.POOLS, 0, HOLDINGS)
    assert next_rung(ladder, TRIMS, HOLDINGS) is Rung.POOLS


def test_the_cooldown_runs_from_the_end_of_a_climb() -> None:
    ladder = take(Ladder(), Rung.POOLS)
    assert not ladder.cooling(0.0, 60.0)
    ended = end(ladder, 100.0)
    assert ended.cooling(159.0, 60.0)
    assert not ended.cooling(160.0, 60.0)
    assert end(ended, 150.0).ended_at == 100.0, "only a climb in progress ends"


def test_wanted_bytes_are_whole_granules() -> None:
    assert whole(1) == 2 * MIB
    assert whole(2 * MIB) == 2 * MIB
    assert whole(-5) == 0
