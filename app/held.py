"""Requests that have arrived and are not admitted: there is no engine, or no memory for more.

They have no headers yet, so that after a while they can still be refused with a status and a time to come back.
"""

import asyncio
import time
from collections.abc import Callable, Iterator

from app.generation import Generation


class Held:
    """`refuse` is called for a request that has waited for `patience_s`."""

    def __init__(self, patience_s: float, refuse: Callable[[Generation], None]) -> None:
        self._patience_s = patience_s
        self._refuse = refuse
        self._waiting: dict[Generation, tuple[asyncio.TimerHandle, float]] = {}
        self.choices = 0
        """How many choices they have."""

    def add(self, generation: Generation) -> None:
        timer = asyncio.get_running_loop().call_later(self._patience_s, self._refuse, generation)
        self._waiting[generation] = timer, time.monotonic()
        self.choices += len(generation.choices)

    def __contains__(self, generation: Generation) -> bool:
        return generation in self._waiting

    def remove(self, generation: Generation) -> float:
        """It is admitted or has ended; the seconds it waited."""
        timer, since = self._waiting.pop(generation)
        timer.cancel()
        self.choices -= len(generation.choices)
        return time.monotonic() - since

    def __iter__(self) -> Iterator[Generation]:
        """In the order of their arrival; they may be removed meanwhile."""
        return iter(list(self._waiting))
