"""Waits until the cards have back what an engine held, once its process is gone.

A driver returns memory some time after the process has ended (measured: 0.15 s for 21 GB, more when it is busy). A
successor that plans before that would plan too small, or fail.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

MIB = 1 << 20
RETURNED = 0.9
"""Share of the engine's own bytes that must be back: the rest may be gone for good, to whoever took it meanwhile."""
AGREE_BYTES = 4 * MIB
"""Where the engine's own bytes are unknown, free memory has settled when two readings differ by no more."""


@dataclass(frozen=True, slots=True)
class CardReading:
    """One device's memory in bytes. `own` is what the engine's process holds, None when nobody can tell."""

    device: int
    uuid: str
    free: int
    own: int | None


class Cards(Protocol):
    """The devices of this machine as the watchdog's sampler reads them."""

    async def sample(self) -> Sequence[CardReading]:
        """Read every device now. One that cannot be read is left out."""

    def latest(self) -> Sequence[CardReading]:
        """What was read last, at most a second ago. One that could not be read is left out."""


class NoCards:
    """The CPU: its memory is back when the process is."""

    async def sample(self) -> Sequence[CardReading]:
        return ()

    def latest(self) -> Sequence[CardReading]:
        return ()


async def settle(
    cards: Cards, before: Sequence[CardReading], *, timeout_s: float, poll_s: float = 0.05
) -> Mapping[int, int | None]:
    """Wait until every device of `before` has its memory back in two readings in a row, or for `timeout_s`.

    `before` was read while the engine lived. What is left is the devices that have not, with the bytes that are
    missing (None: not known); it is logged, and whoever plans next plans with what is free.
    """
    waiting = {reading.device: reading for reading in before}
    last: dict[int, CardReading] = {}
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while waiting:
        now = {reading.device: reading for reading in await cards.sample()}
        if all(_is_back(was, last.get(device), now.get(device)) for device, was in waiting.items()):
            return {}
        last = now
        if loop.time() >= deadline:
            break
        await asyncio.sleep(poll_s)
    missing = {
        device: _missing(was, last.get(device))
        for device, was in waiting.items()
        if not _is_back(was, last.get(device), last.get(device))
    }
    for device, amount in missing.items():
        what = "an unknown amount" if amount is None else f"{amount / MIB:.0f} MiB"
        log.warning("device %d: %s of the last engine's memory is not back after %.0f s", device, what, timeout_s)
    return missing


def _is_back(was: CardReading, last: CardReading | None, now: CardReading | None) -> bool:
    if last is None or now is None:
        return False
    if was.own is None:
        return abs(now.free - last.free) <= AGREE_BYTES
    wanted = was.free + RETURNED * was.own
    return last.free >= wanted and now.free >= wanted


def _missing(was: CardReading, now: CardReading | None) -> int | None:
    if now is None or was.own is None:
        return None
    return max(0, was.free + was.own - now.free)
