"""How much is taken on at once, how fast it goes away, and who is refused."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from app.errors import Draining, EngineUnavailable, QueueFull
from app.observer import Observer
from app.record import Budget

PACE_WINDOW_S = 30.0
RETRY_AFTER_UNKNOWN_S = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_queue` counts choices that wait; `max_inflight_bytes` counts bodies, records and output not yet taken."""

    max_queue: int = 256
    max_inflight_bytes: int = 512 << 20
    hold_s: float = 45.0
    """How long a request that came while there was no engine waits for one."""


class Pace:
    """Choices that end per second, as an average that forgets with PACE_WINDOW_S."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0

    def count(self, now: float) -> None:
        self._rate = self.rate(now) + 1 / PACE_WINDOW_S
        self._at = now

    def rate(self, now: float) -> float:
        return self._rate * math.exp((self._at - now) / PACE_WINDOW_S)


class Intake:
    """The door: what is counted against the limits, and the refusals, each of which is told to the observer."""

    def __init__(self, limits: Limits, observer: Observer) -> None:
        self._limits = limits
        self._observer = observer
        self.budget = Budget(limits.max_inflight_bytes)
        self.pace = Pace()
        self.draining = False
        """Nothing new is taken; what was admitted goes on."""
        self.closed = False
        """There will be no engine any more."""

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """For bytes of a request before its admission: count them with the callable, which raises QueueFull.

        They count until the block is left.
        """
        held = 0

        def count(amount: int) -> None:
            nonlocal held
            if self.budget.used + amount > self.budget.limit:
                self._refuse_for_memory(0)
            self.budget.used += amount
            held += amount

        try:
            yield count
        finally:
            self.budget.used -= held

    def check(self, choices: int, held_bytes: int, *, waiting: int, places: int) -> None:
        """Whether `choices` more may come while so many wait and the engine has so many places free.

        Raises Draining, EngineUnavailable or QueueFull.
        """
        if self.draining:
            self._observer.rejected("draining")
            raise Draining
        if self.closed:
            self._observer.rejected("engine_unavailable")
            raise EngineUnavailable
        if waiting + choices > self._limits.max_queue + places:
            self._observer.rejected("queue_full")
            raise QueueFull(retry_after_s=self._retry_after_s(waiting))
        if self.budget.used + held_bytes > self.budget.limit:
            self._refuse_for_memory(waiting)

    def _refuse_for_memory(self, waiting: int) -> NoReturn:
        self._observer.rejected("queue_full")
        message = "The requests at hand take all the memory set aside."
        raise QueueFull(message, retry_after_s=self._retry_after_s(waiting))

    def _retry_after_s(self, waiting: int) -> float:
        """Time in which the queue empties at the pace of late; the error bounds it."""
        rate = self.pace.rate(time.monotonic())
        return max(1, waiting) / rate if rate > 1e-3 else RETRY_AFTER_UNKNOWN_S
