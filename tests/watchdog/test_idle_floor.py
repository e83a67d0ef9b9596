"""When a window closes, what counts in it, and that it needs no idle moment."""

from watchdog.idle_floor import IdleFloor, Window, observe, opened
from watchdog.snapshot import GIB, MIB, Holdings, Reading, Work


class Bench:
    """Feeds readings in MiB and keeps the windows that closed."""

    def __init__(self, running: int = 1) -> None:
        self.floor: IdleFloor = opened(0.0, Work(running, 0, 0, True), None)
        self.windows: list[Window] = []

    def feed(
        self, at: float, free: int, *, running: int = 1, finished: int = 0, boundary: bool = True, released: int = 0
    ) -> None:
        reading = Reading(at, total=16 * GIB, free=free * MIB, own=(16 * 1024 - free) * MIB)
        work = Work(running, finished, finished * 100, boundary)
        self.floor, window = observe(self.floor, reading, work, Holdings(1, released=released * MIB))
        if window is not None:
            self.windows.append(window)

    @property
    def closed(self) -> list[int]:
        return [window.free // MIB for window in self.windows]


def test_the_highest_reading_is_the_floor() -> None:
    bench = Bench()
    bench.feed(1, 100)
    bench.feed(2, 40)
    bench.feed(3, 98, finished=1)
    assert bench.closed == [100]
    assert (bench.windows[0].at, bench.windows[0].finished) == (1, 0), "of the moment of its highest reading"
    assert bench.floor.idle_free(0) == 100 * MIB


def test_as_many_requests_as_ran_at_its_start_but_at_most_eight() -> None:
    three = Bench(running=3)
    for finished in range(1, 4):
        three.feed(finished, 100, running=3, finished=finished)
    assert len(three.windows) == 1
    many = Bench(running=32)
    for finished in range(1, 17):
        many.feed(finished, 100 + finished, running=32, finished=finished)
    assert [window.finished for window in many.windows] == [8, 16]


def test_a_minute_is_enough_once_one_has_finished() -> None:
    bench = Bench(running=8)
    bench.feed(59, 100, running=8, finished=1)
    bench.feed(60, 100, running=8, finished=1)
    assert len(bench.windows) == 1
    bench.feed(200, 100, running=8, finished=1)
    assert len(bench.windows) == 1, "none has finished since"


def test_readings_with_something_in_flight_do_not_count() -> None:
    bench = Bench()
    bench.feed(1, 500, boundary=False)
    bench.feed(2, 90, finished=0)
    bench.feed(3, 600, boundary=False, finished=1)
    assert bench.closed == [90]


def test_a_window_without_any_boundary_waits_for_one() -> None:
    bench = Bench()
    bench.feed(1, 100, boundary=False, finished=1)
    assert bench.closed == []
    bench.feed(2, 95, finished=1)
    assert bench.closed == [95]


def test_released_bytes_are_no_rise() -> None:
    bench = Bench()
    bench.feed(1, 100)
    bench.feed(2, 149, released=50, finished=1)
    assert bench.closed == [100]
    assert bench.floor.idle_free(50 * MIB) == 150 * MIB
    assert bench.windows[0].own == (16 * 1024 - 100) * MIB


def test_idle_readings_are_known_at_once() -> None:
    bench = Bench()
    bench.feed(1, 1000, running=0)
    bench.feed(2, 100, running=0)
    assert bench.floor.idle_free(0) == 100 * MIB, "a neighbour took memory while nothing ran"
    assert bench.closed == []
