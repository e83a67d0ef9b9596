"""One admitted request as its route sees it: events of all its choices, usage, and the way to give it up."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from app.errors import ApiError
from app.record import ChoiceEvent, Record


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: the prompt counts once, every choice counts, stop ids included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Owner(Protocol):
    """What a generation asks of the scheduler that admitted it."""

    def cancel(self, generation: "Generation") -> None: ...

    def fail(self, generation: "Generation", error: ApiError) -> None: ...


class Generation:
    """The choices of one request. Leave it through `cancel`, best with `async with`: until then its output is held.

    The scheduler writes `open_choices`, `failure`, `is_admitted` and `has_news`, and calls `wake` once a step.
    """

    def __init__(self, request_id: str, choices: list[Record], owner: Owner, held_bytes: int) -> None:
        self.request_id = request_id
        self.choices = choices
        self.held_bytes = held_bytes
        self.open_choices = len(choices)
        self.is_admitted = False
        self.failure: ApiError | None = None
        self.has_news = False
        self._owner = owner
        self._waiter: asyncio.Future[None] | None = None

    async def admitted(self) -> None:
        """Wait until an engine is there to serve this request: at once, unless it came while there was none.

        Raises the ApiError (503 with Retry-After) with which the wait ended. Await it before sending headers.
        """
        while not self.is_admitted and self.failure is None and self.open_choices:
            await self.changed()
        if self.failure is not None and not self.is_admitted:
            raise self.failure

    def events(self, idle_s: float | None = None) -> AsyncIterator[list[ChoiceEvent]]:
        """All that is new since the last item, again and again until every choice has ended.

        With `idle_s` an empty list comes after so many seconds of silence. Cancelling the wait for an item loses
        nothing. Raises the ApiError with which the request failed, after everything that was there before it.
        """
        return _Events(self, idle_s)

    def cancel(self) -> None:
        """End what has not ended and drop output that nobody took. May be called at any time, any number of times."""
        self._owner.cancel(self)

    def fail(self, error: ApiError) -> None:
        """End what has not ended with an error (a time limit, a shutdown), which `events` raises."""
        self._owner.fail(self, error)

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def collect(self) -> list[ChoiceEvent]:
        """What is new, for all choices; an empty list when nothing is."""
        if not self.has_news:
            return []
        self.has_news = False
        return [event for record in self.choices if (event := record.drain()) is not None]

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def changed(self) -> None:
        """Wait for the next `wake`. One consumer at a time."""
        assert self._waiter is None, "a generation has one consumer"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class _Events(AsyncIterator[list[ChoiceEvent]]):
    """Not an async generator: one that is dropped between two items would be finalised some time later."""

    def __init__(self, generation: Generation, idle_s: float | None) -> None:
        self._generation = generation
        self._idle_s = idle_s
        self._idle_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._silent = False

    async def __anext__(self) -> list[ChoiceEvent]:
        generation = self._generation
        while True:
            events = generation.collect()
            if events:
                return events
            if generation.failure is not None:
                raise generation.failure
            if not generation.open_choices:
                raise StopAsyncIteration
            self._silent = False
            if self._idle_s is not None:
                self._watch(self._idle_s)
            await generation.changed()
            if self._silent:
                return []

    def _watch(self, idle_s: float) -> None:
        """Note the start of a wait. One timer serves many: it looks how long the present wait has lasted."""
        loop = asyncio.get_running_loop()
        self._idle_since = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(idle_s, self._look, loop, idle_s)

    def _look(self, loop: asyncio.AbstractEventLoop, idle_s: float) -> None:
        self._timer = None
        rest = self._idle_since + idle_s - loop.time()
        if not self._generation.open_choices:
            return
        if rest > 0:
            self._timer = loop.call_later(rest, self._look, loop, idle_s)
        else:
            self._silent = True
            self._generation.wake()
