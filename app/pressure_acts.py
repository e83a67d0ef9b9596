"""Trims and growth at the engine, one at a time, with what they did as the devices themselves tell it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from app.pressure_books import Books
from app.pressure_notes import Done, Notes
from app.pressure_samples import Samples
from engine.client import EngineClient
from engine.errors import EngineDied
from engine.messages import RungResult
from watchdog.actions import Cap, Outcome, Regrow, Result, Rung, Trim
from watchdog.counts import Counts
from watchdog.snapshot import Holdings, Snapshot

log = logging.getLogger(__name__)

ACT_S = 120.0
"""An engine that does not answer for so long hangs, or is in the middle of a very long step."""


class Acts:
    """Devices are numbered as the source does.

    While `in_flight`, and in readings up to `over_at`, free memory says nothing about requests.
    """

    def __init__(
        self,
        samples: Samples,
        books: Books,
        counts: Counts,
        notes: Notes,
        engine: Callable[[], EngineClient | None],
        holdings: Callable[[], Sequence[Holdings]],
    ) -> None:
        """`engine` is the one of the moment, and `holdings` what it has on each device."""
        self._samples = samples
        self._books = books
        self._counts = counts
        self._notes = notes
        self._engine = engine
        self._holdings = holdings
        self._turn = asyncio.Lock()
        self.in_flight = False
        self.over_at = samples.now()

    async def trim(self, rungs: Sequence[Rung], device: int | None) -> list[Done]:
        """What an operator asks for: rungs, one after another, on one device or on all. Raises EngineDied."""
        every = []
        for rung in rungs:
            for done in await self._trim(rung, device, None):
                self._count(done)
                self._notes.acted("trim", done, by_operator=True)
                every.append(done)
        return every

    async def carry_out(self, action: Trim | Regrow | Cap) -> Outcome:
        """What the policy asks for. What it did on other devices than the one meant is counted here."""
        every: list[Done] = []
        began = self._samples.now()
        try:
            match action:
                case Trim():
                    every = await self._trim(action.rung, action.device, self._keep(action))
                case Regrow():
                    every = await self._grow(action.device, action.wanted)
                case Cap():
                    log.warning("%s: the engine has no owner that could be told to stop", action)
        except EngineDied as error:
            log.warning("the engine ended while it was to %s: %s", action, error)
        own = next((done for done in every if done.device == action.device), None)
        for done in every:
            self._notes.acted("regrow" if isinstance(action, Regrow) else "trim", done)
            if done is not own and isinstance(action, Trim):
                self._count(done)
        over = self._samples.now()
        if own is None:
            return Outcome(action, over, "failed", seconds=over - began)
        return Outcome(action, over, own.result, max(0, own.returned or 0), own.seconds)

    async def _trim(self, rung: Rung, device: int | None, keep_bytes: int | None) -> list[Done]:
        of_engine = None if device is None else self._books.engine_device(device)
        return await self._measured(rung, device, lambda engine: engine.trim(rung.value, of_engine, keep_bytes))

    async def _grow(self, device: int, wanted: int) -> list[Done]:
        of_engine = self._books.engine_device(device)
        return await self._measured(Rung.ELASTIC, device, lambda engine: engine.grow(of_engine, wanted))

    def _keep(self, action: Trim) -> int | None:
        """Elastic bytes that may stay on the device, for `wanted` to go."""
        if action.wanted is None:
            return None
        return max(0, self._holdings()[action.device].elastic.held - action.wanted)

    async def _measured(
        self, rung: Rung, device: int | None, ask: Callable[[EngineClient], Awaitable[Sequence[RungResult]]]
    ) -> list[Done]:
        async with self._turn:
            engine = self._engine()
            if engine is None:
                raise EngineDied("there is no engine at the moment")
            self.in_flight = True
            began = self._samples.now()
            try:
                before = await self._samples.fresh()
                try:
                    results = await asyncio.wait_for(ask(engine), ACT_S)
                except TimeoutError:
                    message = f"the engine did not answer within {ACT_S:.0f} s"
                    return [Done(rung, device or 0, "failed", None, self._samples.now() - began, message)]
                after = await self._samples.fresh()
                places = [(self._books.place_of(result.device), result) for result in results]
                done = [
                    _done(rung, place, result, began, before, after) for place, result in places if place is not None
                ]
                for each in done:
                    self._books.returned(each.device, rung, each.returned or 0)
                return done
            finally:
                self.in_flight = False
                self.over_at = self._samples.now()

    def _count(self, done: Done) -> None:
        self._counts.trimmed(done.device, done.rung, done.result, done.returned or 0, done.seconds)


def _done(rung: Rung, device: int, told: RungResult, began: float, before: Snapshot, after: Snapshot) -> Done:
    was, now = _free(before, device, began), _free(after, device, began)
    returned = None if was is None or now is None else now - was
    result: Result = "ok" if told.result == "ok" else "noop" if told.result == "noop" else "failed"
    return Done(rung, device, result, returned, told.seconds, told.message)


def _free(snapshot: Snapshot, device: int, since: float) -> int | None:
    """Bytes, as read after `since`."""
    shown = snapshot.devices[device]
    fresh = shown.reading is not None and shown.health.failures == 0 and shown.reading.at >= since
    return shown.reading.free if shown.reading is not None and fresh else None
