"""Requests as the watchdog counts them, and what each left behind.

Told by the scheduler when a request comes and goes and when the engine has done a step, and by the watchdog when the
devices have been read. A request that ran alone is judged by readings before and after it; for one that did not,
readings say nothing, so it only gets what was known of idle memory at its begin and end.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.events import rfc3339
from app.generation import Generation
from app.observer import NoObserver
from app.record import Record
from app.request_table import DeviceRow, RequestTable, Row
from engine.messages import StepStats
from watchdog.snapshot import Work

NEAR_S = 0.05
"""A reading at most so long after a step has ended is one at a step boundary."""
STEP_SAMPLE_S, END_SAMPLE_S = 0.25, 0.05
"""Readings are asked for at most so often at the ends of steps, and of requests."""
UNREAD_S = 5.0
"""So long a row waits for a reading after its request."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One device at one moment: bytes, None is unknown."""

    free: int | None
    own: int | None
    ledger: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Marks:
    """All devices at one look, under the engine of one generation."""

    at: float
    generation: int
    devices: Sequence[Mark]


class _Request:
    """One that is open, or has ended and waits to be written down."""

    def __init__(self, generation: Generation, before: Marks | None, floors: Sequence[int | None]) -> None:
        self.choices = generation.choices
        self.id = generation.request_id
        self.open_choices = len(generation.choices)
        self.overlap = 0
        self.before = before
        self.floors = floors
        self.ended_at = 0.0
        self.wall = 0.0

    @property
    def has_begun(self) -> bool:
        return any(record.submitted_at is not None for record in self.choices)

    @property
    def prompts(self) -> list[Record]:
        """One choice of each prompt."""
        return list({id(record.prompt_ids): record for record in reversed(self.choices)}.values())


class Workload(NoObserver):
    def __init__(
        self,
        table: RequestTable,
        now: Callable[[], float],
        idle_floors: Callable[[], Sequence[int | None]],
        read: Callable[[bool], None],
    ) -> None:
        """`now` is the clock of all readings; `read(processes)` asks for one, of the process lists too."""
        self._table = table
        self._now = now
        self._idle_floors = idle_floors
        self._read = read
        self._open: dict[int, _Request] = {}
        """By the sequence of each choice that has not ended."""
        self._unread: list[_Request] = []
        self._latest: Marks | None = None
        self._finished = 0
        self._prompt_tokens = 0
        self._last_step = self._last_end = self._asked = now()
        self._idle_since: float | None = now()
        self.blocks_used = 0

    # The scheduler's observer.

    def request_admitted(self, generation: Generation) -> None:
        at_rest = not self._open and not self._unread
        known = self._latest if at_rest and self._latest and self._latest.at >= self._last_end else None
        request = _Request(generation, known, self._idle_floors())
        self._open.update((record.sequence, request) for record in generation.choices)
        self._idle_since = None

    def finished(self, record: Record) -> None:
        request = self._open.pop(record.sequence)
        request.open_choices -= 1
        if request.open_choices or not request.has_begun:
            return
        self._last_end = request.ended_at = self._now()
        request.wall = time.time()
        others = {other for other in self._open.values() if other.has_begun}
        request.overlap += len(others)
        for other in others:
            other.overlap += 1
        self._finished += 1
        self._prompt_tokens += sum(len(record.prompt_ids) for record in request.prompts)
        if request.overlap or not request.floors:
            self._write(request, None)
            self._ask(END_SAMPLE_S, processes=False)
        else:
            self._unread.append(request)
            self._ask(0.0, processes=True)

    def step(self, stats: StepStats) -> None:
        self._last_step = self._now()
        self.blocks_used = stats.kv_blocks_used
        self._ask(STEP_SAMPLE_S, processes=False)

    # The watchdog.

    def begin(self) -> None:
        """An engine is ready: what follows is counted from here."""
        self._finished = self._prompt_tokens = self.blocks_used = 0

    def work(self, at: float, *, quiet: bool, busy: bool) -> Work:
        """How things were when the devices were read at `at`.

        `quiet`: no trim, load or shrink was in flight. `busy`: the engine has something to do, or requests are held.
        """
        running = len({request for request in self._open.values() if request.has_begun})
        at_rest = running == 0 and not busy and at >= max(self._last_step, self._last_end)
        if self._open or busy:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._now()
        return Work(
            running=running,
            finished=self._finished,
            prompt_tokens=self._prompt_tokens,
            boundary=quiet and (at_rest or 0.0 <= at - self._last_step <= NEAR_S),
            idle_since=self._idle_since,
        )

    def marked(self, marks: Marks) -> None:
        """The devices have been read, or there is no engine whose memory they show."""
        self._latest = marks
        for request in self._open.values():
            if request.before is None and marks.at >= self._last_end:
                request.before = marks
        late = self._now() - UNREAD_S
        for request in [each for each in self._unread if marks.at >= each.ended_at or each.ended_at < late]:
            self._unread.remove(request)
            self._write(request, marks if marks.at >= request.ended_at else None)

    def _ask(self, least_s: float, *, processes: bool) -> None:
        now = self._now()
        if now - self._asked >= least_s:
            self._asked = now
            self._read(processes)

    def _write(self, request: _Request, after: Marks | None) -> None:
        cached = [record.cached_tokens for record in request.prompts if record.cached_tokens is not None]
        self._table.add(
            Row(
                id=request.id,
                finished_at=rfc3339(request.wall),
                prompt_tokens=sum(len(record.prompt_ids) for record in request.prompts),
                cached_tokens=sum(cached) if cached else None,
                generated_tokens=sum(len(record.generated_ids) for record in request.choices),
                overlap=request.overlap,
                devices=self._devices(request, after),
            )
        )

    def _devices(self, request: _Request, after: Marks | None) -> list[DeviceRow]:
        if request.overlap:
            pairs = zip(request.floors, self._idle_floors(), strict=True)
            return [DeviceRow(device, was, now, None, None) for device, (was, now) in enumerate(pairs)]
        before = request.before
        if before is None or after is None or before.generation != after.generation:
            # Nothing was read, or another engine came in between, and whatever changed is not the request's doing.
            free = [[mark.free for mark in marks.devices] if marks else None for marks in (before, after)]
            nothing = [None] * len(request.floors)
            pairs = zip(free[0] or nothing, free[1] or nothing, strict=True)
            return [DeviceRow(device, was, now, None, None) for device, (was, now) in enumerate(pairs)]
        both = zip(before.devices, after.devices, strict=True)
        return [_changed(device, was, now) for device, (was, now) in enumerate(both)]


def _changed(device: int, was: Mark, now: Mark) -> DeviceRow:
    if was.free is None or now.free is None:
        return DeviceRow(device, was.free, now.free, None, None)
    owners = {owner: now.ledger.get(owner, 0) - was.ledger.get(owner, 0) for owner in {**was.ledger, **now.ledger}}
    if was.own is not None and now.own is not None:
        owners["unaccounted"] = now.own - was.own - sum(owners.values())
    return DeviceRow(device, was.free, now.free, now.free - was.free, owners)
