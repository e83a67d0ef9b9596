"""Requests as the watchdog counts them: windows, boundaries, what each left behind."""

import pytest

from app.generation import Generation
from app.pressure_work import NEAR_S, UNREAD_S, Mark, Marks, Workload
from app.record import Budget, ChoiceRequest, Record
from app.request_table import DeviceRow, RequestTable, Row
from app.text.stream import TextStream
from engine.messages import Sampling, StepStats

STATS = StepStats(1, 0, 1, 0, 7, 0, 100, 0, 0, 0, 0.01)


class Bench:
    """One device; the clock and its free memory are the test's."""

    def __init__(self, devices: int = 1) -> None:
        self.now = 100.0
        self.free: int | None = 1000
        self.own: int | None = 500
        self.ledger = {"weights": 300}
        self.generation = 1
        self.floors: list[int | None] = [990] * devices
        self.table = RequestTable()
        self.asked: list[bool] = []
        self.work = Workload(self.table, lambda: self.now, lambda: self.floors, self.asked.append)
        self._sequence = 0

    def read(self, at: float | None = None) -> None:
        marks = [Mark(self.free, self.own, dict(self.ledger)) for _ in self.floors]
        self.work.marked(Marks(self.now if at is None else at, self.generation, marks))

    def admit(self, choices: int = 1, prompt: int = 3) -> Generation:
        request = ChoiceRequest(list(range(prompt)), Sampling(), 10, ())
        records = []
        for index in range(choices):
            self._sequence += 1
            text, budget = TextStream([b"a"], ()), Budget(1 << 20)
            records.append(Record(self._sequence, "r", index, request, text, budget, "", self.now))
        generation = Generation("r", records, None, 0)  # type: ignore[arg-type]
        self.work.request_admitted(generation)
        return generation

    def start(self, generation: Generation) -> Generation:
        for record in generation.choices:
            record.submitted_at = self.now
            record.cached_tokens = 1
        return generation

    def end(self, generation: Generation) -> None:
        for record in generation.choices:
            record.end("length", self.now, None)
            self.work.finished(record)

    def run(self, taking: float = 1.0) -> None:
        generation = self.start(self.admit())
        self.now += taking
        self.end(generation)

    @property
    def rows(self) -> list[Row]:
        return self.table.rows


def test_a_lone_request_is_judged_by_readings_before_and_after() -> None:
    bench = Bench()
    bench.read()
    generation = bench.start(bench.admit(choices=2))
    generation.choices[0].generated_ids += [1, 2]
    bench.now += 5
    bench.read()
    bench.free, bench.own, bench.ledger = 900, 600, {"weights": 300, "pool_cached": 30}
    bench.end(generation)
    assert bench.rows == []
    assert bench.asked[-1] is True
    bench.read(at=bench.now - 0.1)  # taken before its end
    assert bench.rows == []
    bench.read()
    [row] = bench.rows
    assert (row.prompt_tokens, row.cached_tokens, row.generated_tokens, row.overlap) == (3, 1, 2, 0)
    changes = {"weights": 0, "pool_cached": 30, "unaccounted": 70}
    assert row.devices == [DeviceRow(0, 1000, 900, -100, changes)]


def test_the_next_request_begins_where_the_last_one_ended() -> None:
    bench = Bench()
    bench.read()
    bench.run()
    second = bench.start(bench.admit())  # before anything could be read
    bench.free = 980
    bench.read()
    bench.now += 1
    bench.end(second)
    bench.free = 970
    bench.read()
    assert [(row.devices[0].idle_free_before, row.devices[0].idle_free_after) for row in bench.rows] == [
        (1000, 980),
        (980, 970),
    ]


def test_unknown_stays_unknown() -> None:
    bench = Bench()
    bench.own = None
    bench.read()
    bench.run()
    bench.free = 995
    bench.read()
    bench.free = None
    bench.read()
    bench.run()
    bench.read()
    assert [row.devices[0] for row in bench.rows] == [
        DeviceRow(0, 1000, 995, -5, {"weights": 0}),
        DeviceRow(0, None, None, None, None),
    ]


def test_another_engines_memory_is_not_the_requests_doing() -> None:
    bench = Bench()
    bench.read()
    bench.run()
    bench.generation, bench.free = 2, 5000
    bench.read()
    assert bench.rows[0].devices == [DeviceRow(0, 1000, 5000, None, None)]


def test_a_reading_that_never_comes_is_not_waited_for() -> None:
    bench = Bench()
    bench.read()
    at = bench.now
    bench.run()
    bench.now += UNREAD_S + 1
    bench.read(at=at)
    assert bench.rows[0].devices == [DeviceRow(0, 1000, None, None, None)]


def test_overlap_counts_all_who_ran_beside_it() -> None:
    bench = Bench()
    bench.read()
    long, queued = bench.start(bench.admit()), bench.admit()
    for _ in range(3):
        bench.run()
    bench.end(long)
    bench.start(queued)
    bench.now += 1
    bench.end(queued)
    bench.read()
    assert [row.overlap for row in bench.rows] == [1, 1, 1, 3, 0]
    assert bench.rows[0].devices == [DeviceRow(0, 990, 990, None, None)]


def test_what_never_ran_is_not_there() -> None:
    bench = Bench()
    bench.end(bench.admit())
    bench.read()
    assert bench.rows == []
    assert bench.work.work(bench.now, quiet=True, busy=False).finished == 0


def test_on_the_plain_cpu_rows_are_written_at_once() -> None:
    bench = Bench(devices=0)
    bench.run()
    assert [row.devices for row in bench.rows] == [[]]


def test_what_the_watchdog_is_told() -> None:
    bench = Bench()
    since = bench.now
    assert bench.work.work(bench.now, quiet=True, busy=False).idle_since == since
    bench.now += 9
    one, two = bench.start(bench.admit(choices=3)), bench.admit(prompt=5)
    told = bench.work.work(bench.now, quiet=True, busy=True)
    assert (told.running, told.finished, told.idle_since) == (1, 0, None)
    bench.start(two)
    bench.now += 1
    bench.end(one)
    bench.end(two)
    told = bench.work.work(bench.now, quiet=True, busy=False)
    assert (told.running, told.finished, told.prompt_tokens, told.idle_since) == (0, 2, 8, bench.now)
    bench.work.step(STATS)
    assert bench.work.blocks_used == 7
    bench.work.begin()
    told = bench.work.work(bench.now, quiet=True, busy=False)
    assert (told.finished, told.prompt_tokens, bench.work.blocks_used) == (0, 0, 0)


@pytest.mark.parametrize(
    ("after_step", "quiet", "busy", "boundary"),
    [
        (0.0, True, True, True),
        (NEAR_S, True, True, True),
        (NEAR_S + 0.01, True, True, False),  # within the next step
        (-0.01, True, True, False),  # within the step itself
        (0.0, False, True, False),
        (60.0, True, False, True),  # nothing runs
        (60.0, False, False, False),
        (60.0, True, True, False),  # a cancelled request's blocks are still coming back
    ],
)
def test_readings_count_at_step_boundaries(after_step: float, quiet: bool, busy: bool, boundary: bool) -> None:
    bench = Bench()
    bench.now += 1
    bench.work.step(STATS)
    told = bench.work.work(bench.now + after_step, quiet=quiet, busy=busy)
    assert told.boundary is boundary


def test_a_reading_from_before_the_last_end_is_none_at_rest() -> None:
    bench = Bench()
    at = bench.now + 0.5
    bench.run(taking=1.0)
    assert not bench.work.work(at, quiet=True, busy=False).boundary
    assert bench.work.work(bench.now, quiet=True, busy=False).boundary


def test_readings_are_asked_for_at_the_ends_of_steps_but_not_of_each() -> None:
    bench = Bench()
    for _ in range(100):
        bench.now += 0.01
        bench.work.step(STATS)
    assert 3 <= len(bench.asked) <= 5
