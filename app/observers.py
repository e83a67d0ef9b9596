"""Several observers as one."""

from collections.abc import Sequence

from app.generation import Generation
from app.observer import Observer
from app.record import Record
from engine.messages import StepStats


class Observers:
    """Each hears of everything, in the order in which they were added."""

    def __init__(self, *observers: Observer) -> None:
        self._each = observers

    def request_admitted(self, generation: Generation) -> None:
        for each in self._each:
            each.request_admitted(generation)

    def rejected(self, reason: str) -> None:
        for each in self._each:
            each.rejected(reason)

    def held(self, seconds: float) -> None:
        for each in self._each:
            each.held(seconds)

    def first_token(self, seconds: float) -> None:
        for each in self._each:
            each.first_token(seconds)

    def tokens(self, count: int) -> None:
        for each in self._each:
            each.tokens(count)

    def token_gaps(self, seconds: list[float]) -> None:
        for each in self._each:
            each.token_gaps(seconds)

    def finished(self, record: Record) -> None:
        for each in self._each:
            each.finished(record)

    def step(self, stats: StepStats) -> None:
        for each in self._each:
            each.step(stats)

    def interrupted(self, queued: int, at_engine: Sequence[Record]) -> None:
        for each in self._each:
            each.interrupted(queued, at_engine)

    def recomputed(self, tokens: int) -> None:
        for each in self._each:
            each.recomputed(tokens)

    def engine_restarted(self, reason: str) -> None:
        for each in self._each:
            each.engine_restarted(reason)

    def reload_begun(self, reason: str) -> None:
        for each in self._each:
            each.reload_begun(reason)

    def reload_phase(self, phase: str, seconds: float) -> None:
        for each in self._each:
            each.reload_phase(phase, seconds)

    def reload_returned(self, device: int, bytes: int) -> None:
        for each in self._each:
            each.reload_returned(device, bytes)

    def reload_ended(self, reason: str, result: str) -> None:
        for each in self._each:
            each.reload_ended(reason, result)
