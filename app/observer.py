"""What becomes of requests and steps, for whoever counts it; `app.metrics` does."""

from typing import Protocol

from app.generation import Generation
from app.record import Record
from engine.messages import StepStats


class Observer(Protocol):
    """Told by the scheduler and the supervisor. Called on the event loop; must be cheap and must not raise."""

    def request_admitted(self, generation: Generation) -> None: ...

    def rejected(self, reason: str) -> None:
        """`queue_full`, `draining` or `engine_unavailable`."""

    def first_token(self, seconds: float) -> None:
        """From admission, once for each choice."""

    def tokens(self, count: int) -> None:
        """Generated tokens, once a step."""

    def token_gaps(self, seconds: list[float]) -> None:
        """Time since the choice's token before, for every choice that had one, once a step."""

    def finished(self, record: Record) -> None:
        """The record has ended; `outcome` says how. Called exactly once for each admitted choice."""

    def step(self, stats: StepStats) -> None: ...

    def engine_restarted(self, reason: str) -> None: ...


class NoObserver:
    """Looks the other way."""

    def request_admitted(self, generation: Generation) -> None: ...

    def rejected(self, reason: str) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def tokens(self, count: int) -> None: ...

    def token_gaps(self, seconds: list[float]) -> None: ...

    def finished(self, record: Record) -> None: ...

    def step(self, stats: StepStats) -> None: ...

    def engine_restarted(self, reason: str) -> None: ...
