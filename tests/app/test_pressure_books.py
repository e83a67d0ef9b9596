"""The engine's ledger in the watchdog's terms: what is elastic, what was released."""

from app.pressure_books import Books
from engine.messages import DeviceReady, Ready
from watchdog.actions import Rung
from watchdog.snapshot import MIB

HELD = {"weights": 1000 * MIB, "kv_cache": 600 * MIB, "shadow": 100 * MIB, "cublas_workspace": 64 * MIB}


def device(number: int, **changes: object) -> DeviceReady:
    fields = {"stages": [number], "total": 4096 * MIB, "reserve": 512 * MIB, "ledger": HELD, "largest_late_bytes": MIB}
    fields |= {"elastic_bytes": 400 * MIB, "elastic_plan_bytes": 500 * MIB}
    return DeviceReady(device=number, uuid=f"GPU-{number}", name="card", **{**fields, **changes})  # type: ignore[arg-type]


def ready(*devices: DeviceReady) -> Ready:
    return Ready("cuda", 4096, 64, "f16", 60, 600 * MIB, 0, 0.0, devices=list(devices))


def test_at_ready() -> None:
    books = Books(["GPU-0"])
    books.begin(3, ready(device(0)))
    [plan], [held] = books.plans(), books.holdings(None, 0)
    assert (plan.reserve, plan.largest_late, plan.stages) == (512 * MIB, MIB, (0,))
    assert (held.generation, held.released, held.ledger) == (3, 0, HELD)
    assert (held.elastic.plan, held.elastic.held, held.elastic.busy) == (600 * MIB, 500 * MIB, 0)


def test_what_trims_gave_back_and_what_came_again() -> None:
    books = Books(["GPU-0"])
    books.begin(1, ready(device(0)))
    less = {**HELD, "kv_cache": 450 * MIB, "shadow": 0, "cublas_workspace": 0}
    [held] = books.holdings([less], 0)
    assert held.released == (150 + 100 + 64) * MIB
    assert held.elastic.held == 250 * MIB
    [held] = books.holdings([{**less, "kv_cache": 700 * MIB}], 0)
    assert held.released == (-100 + 100 + 64) * MIB
    assert held.elastic.held == 500 * MIB
    [held] = books.holdings([{**HELD, "cublas_workspace": 128 * MIB, "pool_cached": 2 * MIB}], 0)
    assert held.released == 0, "what grows beyond its size at ready is a loss"


def test_bytes_that_no_ledger_tells_are_taken_from_the_source() -> None:
    books = Books(["GPU-0"])
    books.begin(1, ready(device(0)))
    books.returned(0, Rung.STACK_LIMIT, 200 * MIB)
    books.returned(0, Rung.ELASTIC, 50 * MIB)
    books.returned(0, Rung.STACK_LIMIT, -2 * MIB)
    assert books.holdings(None, 0)[0].released == 200 * MIB
    books.begin(2, ready(device(0)))
    assert books.holdings(None, 0)[0].released == 0


def test_blocks_of_live_sequences_are_busy() -> None:
    books = Books(["GPU-0"])
    books.begin(1, ready(device(0)))
    # 60 blocks of 10 MiB; the first 20 are the minimum.
    assert [books.holdings(None, blocks)[0].elastic.busy for blocks in (0, 20, 25)] == [0, 0, 50 * MIB]


def test_devices_are_known_by_their_uuid() -> None:
    books = Books(["GPU-9", "GPU-1", "GPU-0"])
    books.begin(1, ready(device(0), device(1)))
    assert [plan.reserve for plan in books.plans()] == [0, 512 * MIB, 512 * MIB]
    assert [books.place_of(number) for number in (0, 1, 2)] == [2, 1, None]
    assert [books.engine_device(here) for here in (1, 2)] == [1, 0]
    told = [{"weights": 7}, {"weights": 8}]
    assert [held.ledger for held in books.holdings(told, 0)] == [{}, {"weights": 8}, {"weights": 7}]
    assert [held.ledger for held in books.nothing()] == [{}, {}, {}]
