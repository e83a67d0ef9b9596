"""What becomes of requests, steps and engines, for whoever counts it; `app.metrics` does."""

from collections.abc import Sequence
from typing import Protocol

from app.generation import Generation
from app.record import Record
from engine.messages import StepStats


class Observer(Protocol):
    """Told by the scheduler and the supervisor. Called on the event loop; must be cheap and must not raise."""

    def request_admitted(self, generation: Generation) -> None: ...

    def rejected(self, reason: str) -> None:
        """`queue_full`, `draining`, `engine_unavailable` or `device_pressure`."""

    def held(self, seconds: float) -> None:
        """A request that had come while there was no engine is held no more, however that ended."""

    def first_token(self, seconds: float) -> None:
        """From admission, once for each choice."""

    def tokens(self, count: int) -> None:
        """Generated tokens, once a step."""

    def token_gaps(self, seconds: list[float]) -> None:
        """Time since the choice's token before, for every choice that had one, once a step."""

    def finished(self, record: Record) -> None:
        """The record has ended; `outcome` says how. Called exactly once for each admitted choice."""

    def step(self, stats: StepStats) -> None: ...

    def interrupted(self, queued: int, at_engine: Sequence[Record]) -> None:
        """An engine is gone: the choices that it had not finished, and how many waited for it."""

    def recomputed(self, tokens: int) -> None:
        """What an engine computes again of an interrupted choice."""

    def engine_restarted(self, reason: str) -> None:
        """Another engine serves: `reload`, `operator`, `crash` or `hang`."""

    def reload_begun(self, reason: str) -> None:
        """The engine is to be replaced, or is gone: `vram_*`, `operator` or `engine_fault`."""

    def reload_phase(self, phase: str, seconds: float) -> None:
        """A phase is over, `total` with the last one."""

    def reload_returned(self, device: int, bytes: int) -> None:
        """How much more is free on a device than before."""

    def reload_ended(self, reason: str, result: str) -> None:
        """`ok`, `failed` (no engine could be had) or `aborted` (the old one stays, or the service ends)."""


class NoObserver:
    """Looks the other way."""

    def request_admitted(self, generation: Generation) -> None: ...

    def rejected(self, reason: str) -> None: ...

    def held(self, seconds: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def tokens(self, count: int) -> None: ...

    def token_gaps(self, seconds: list[float]) -> None: ...

    def finished(self, record: Record) -> None: ...

    def step(self, stats: StepStats) -> None: ...

    def interrupted(self, queued: int, at_engine: Sequence[Record]) -> None: ...

    def recomputed(self, tokens: int) -> None: ...

    def engine_restarted(self, reason: str) -> None: ...

    def reload_begun(self, reason: str) -> None: ...

    def reload_phase(self, phase: str, seconds: float) -> None: ...

    def reload_returned(self, device: int, bytes: int) -> None: ...

    def reload_ended(self, reason: str, result: str) -> None: ...
