"""The sampling thread as the event loop sees it: told of every snapshot, and asked for fresh ones."""

import asyncio
from collections.abc import Callable, Sequence

from app.settle import CardReading
from watchdog.sampler import SLOW_CALL_S, Sampler
from watchdog.snapshot import Snapshot

PATIENCE_S = SLOW_CALL_S + 1.0
"""How long a fresh snapshot is waited for. A thread that takes longer hangs inside a call, and its device is blind."""


class Samples:
    """Whoever waits for the cards of this machine waits here; `app.settle.Cards` is kept."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._news = asyncio.Event()
        self._told: Callable[[], None] = lambda: None

    @property
    def uuids(self) -> list[str]:
        return [device.uuid for device in self._sampler.snapshot().devices]

    def now(self) -> float:
        """The clock of all readings."""
        return self._sampler.now()

    def start(self, told: Callable[[], None]) -> None:
        """Sample from now on, if there are cards; `told` is called on this event loop after each snapshot."""
        if not self.uuids:
            return
        self._told = told
        loop = asyncio.get_running_loop()

        def publish(_: Snapshot) -> None:
            try:
                loop.call_soon_threadsafe(self._published)
            except RuntimeError:  # a call that hung has come back after the loop was closed: nobody is left to tell
                return

        self._sampler.start(publish)

    async def stop(self) -> None:
        await asyncio.to_thread(self._sampler.stop)

    async def fresh(self) -> Snapshot:
        """Every device read after this moment, its process list too; the last that is known if the thread hangs."""
        asked = self._sampler.now()
        self._sampler.request(processes=True)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (PATIENCE_S if self.uuids else 0.0)
        while (snapshot := self._sampler.snapshot()).at < asked:
            try:
                await asyncio.wait_for(self._news.wait(), deadline - loop.time())
            except TimeoutError:
                break
        return snapshot

    async def sample(self) -> Sequence[CardReading]:
        asked = self._sampler.now()
        return _cards(await self.fresh(), since=asked)

    def latest(self) -> Sequence[CardReading]:
        return _cards(self._sampler.snapshot(), since=self._sampler.now() - PATIENCE_S)

    def _published(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
        self._told()


def _cards(snapshot: Snapshot, since: float) -> list[CardReading]:
    """Those whose last reading did not fail and is not from before `since`."""
    return [
        CardReading(device.device, device.uuid, reading.free, reading.own)
        for device in snapshot.devices
        if (reading := device.reading) is not None and device.health.failures == 0 and reading.at >= since
    ]
