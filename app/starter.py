"""Starts engines: one at a time, as often as it is worth while, with less if it must be."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from app.boot import Boot
from app.card_lock import CardLocks
from app.fallback import fallbacks
from app.life import Life
from app.patience import Patience
from app.scheduler import RequestScheduler
from app.settle import Cards
from engine.client import EngineClient, EngineEvents
from engine.config import EngineConfig
from engine.errors import EngineDied, LoadRefused
from engine.messages import Ready

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

EngineFactory = Callable[[int, EngineEvents], EngineClient]
"""(generation, events) → an engine not started yet; `engine.client.EngineLauncher` is one."""


class Starter:
    """Makes lives of engines, and keeps what one start has to know of the ones before it."""

    def __init__(
        self,
        factory: EngineFactory,
        config: EngineConfig,
        scheduler: RequestScheduler,
        patience: Patience,
        cards: Cards,
        boot: Boot,
        locks: CardLocks,
    ) -> None:
        self._factory = factory
        self._config = config
        self._scheduler = scheduler
        self._patience = patience
        self._cards = cards
        self._boot = boot
        self._locks = locks
        self._starting: Life | None = None
        self.generation = 0
        """Of the youngest engine."""
        self.ready: Ready | None = None
        """What the last engine that came up chose and has."""
        self.failed_starts = 0
        """In a row."""
        self.lives_in_vain = 0
        """Of engines that died young and without a token, in a row."""

    def beget(self, life: Life) -> Life:
        """Give a life its engine, of the next generation. Nothing is started yet."""
        self.generation += 1
        life.engine = self._factory(self.generation, life)
        return life

    async def first(self, life: Life) -> tuple[Ready, EngineConfig]:
        """Start the first engine, once. Raises EngineError."""
        config = fallbacks(self._config, None, self._boot.without)[0]
        await self.prepare(life)
        return await self._load(life, config, restore=False), config

    async def prepare(self, life: Life) -> None:
        """Start, import and parse; asked again, it says how that went. Raises EngineError."""
        await self._listened_to(life, life.engine.prepare())

    async def next(
        self,
        first: Life,
        another: Callable[[], Life],
        began: Callable[[Life], None],
        *,
        restore: bool,
        all_parts: bool,
        cause: str,
    ) -> tuple[Life, Ready, EngineConfig]:
        """Start the `first`, and others after it with one fallback after the other, until one is ready.

        `began` hears of every load. With `all_parts` what had been left out is tried again. Raises EngineError when
        no engine can be had.
        """
        tries = fallbacks(self._config, self.ready, () if all_parts else self._boot.without)
        backoff = self._patience.backoff
        while self.failed_starts < backoff.tries and self.lives_in_vain < backoff.lives:
            await asyncio.sleep(backoff.wait_s(self.failed_starts, self.lives_in_vain))
            config = tries[min(self.failed_starts, len(tries) - 1)]
            life = first if self.failed_starts == 0 else another()
            self.failed_starts += 1
            try:
                await self.prepare(life)
                began(life)
                ready = await self._load(life, config, restore=restore)
            except (EngineDied, LoadRefused) as error:
                cause = str(error)
                log.error("engine generation=%d did not start: %s", life.engine.generation, cause)
            else:
                self.failed_starts = 0
                return life, ready, config
        raise EngineDied(f"{cause} ({max(self.failed_starts, self.lives_in_vain)} starts in a row failed)")

    def look(self, seconds: float) -> None:
        """Called every so often: an engine that starts and has said nothing for too long is ended."""
        life = self._starting
        if life is None:
            return
        life.silent_s += seconds
        if life.silent_s > self._patience.start_s:
            log.error("engine generation=%d hangs while it starts", life.engine.generation)
            life.engine.kill()

    async def _load(self, life: Life, config: EngineConfig, *, restore: bool) -> Ready:
        devices = self.ready.devices if self.ready is not None else self._cards.latest()
        async with self._locks.held(device.uuid for device in devices):
            ready = await self._listened_to(life, life.engine.load(config, restore))
        if life.death is not None:
            raise EngineDied(life.death)
        needed = self._scheduler.context_needed
        if ready.max_context < needed:
            await life.engine.stop(self._patience.stop_s)
            problem = (
                f"there is room for a context of {ready.max_context} tokens, and the requests at hand need {needed}"
            )
            raise LoadRefused("DoesNotFit", problem)
        self.ready = ready
        return ready

    async def _listened_to(self, life: Life, answer: Awaitable[Answer]) -> Answer:
        life.silent_s = 0.0
        self._starting = life
        try:
            return await answer
        finally:
            self._starting = None
