"""When the memory of a dead engine is back."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from app.settle import AGREE_BYTES, MIB, CardReading, NoCards, settle

GIB = 1 << 30


class Scripted:
    """Each sample is the next of `readings`; the last one comes again and again."""

    def __init__(self, *readings: Sequence[CardReading]) -> None:
        self._readings = list(readings)
        self.samples = 0

    async def sample(self) -> Sequence[CardReading]:
        self.samples += 1
        await asyncio.sleep(0)
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]

    def latest(self) -> Sequence[CardReading]:
        raise AssertionError("what was read before is not what is there now")


def card(free: int, own: int | None = None, device: int = 0) -> CardReading:
    return CardReading(device, f"GPU-{device}", free, own)


Readings = Sequence[CardReading]


async def run(before: Readings, *after: Readings, timeout_s: float = 5.0) -> tuple[int, object]:
    """How many samples it took, and what is missing."""
    cards = Scripted(*after)
    missing = await settle(cards, before, timeout_s=timeout_s, poll_s=0.0)
    return cards.samples, missing


async def test_nothing_to_wait_for() -> None:
    assert await settle(NoCards(), [], timeout_s=0.0) == {}
    assert (await NoCards().sample(), NoCards().latest()) == ((), ())


async def test_two_samples_must_say_that_nine_tenths_are_back() -> None:
    before = [card(1 * GIB, own=10 * GIB)]
    assert await run(before, [card(11 * GIB)]) == (2, {})
    assert await run(before, [card(10 * GIB)]) == (2, {}), "exactly 90 %"
    almost = card(10 * GIB - 1)
    assert await run(before, [almost], [almost], [card(10 * GIB)], [almost], [card(11 * GIB)]) == (6, {})


async def test_every_device_must_have_its_own_back_at_once() -> None:
    before = [card(0, own=GIB, device=0), card(0, own=2 * GIB, device=1)]
    first, second = card(GIB, device=0), card(2 * GIB, device=1)
    halves = [first, card(0, device=1)], [card(0, device=0), second]
    assert await run(before, *halves, [first, second]) == (4, {})


async def test_where_the_own_bytes_are_unknown_two_samples_agree() -> None:
    before = [card(5 * GIB)]
    rising = [[card(5 * GIB + n * (AGREE_BYTES + 1))] for n in range(4)]
    last = rising[-1][0].free
    assert await run(before, *rising, [card(last + AGREE_BYTES)]) == (5, {})
    assert await run(before, *rising, [card(last - AGREE_BYTES)]) == (5, {})


async def test_a_device_that_cannot_be_read_is_waited_for() -> None:
    before = [card(0, own=GIB)]
    assert await run(before, [card(GIB)], [], [card(GIB)]) == (4, {}), "two in a row"


async def test_what_never_comes_back_is_said_and_left(caplog: pytest.LogCaptureFixture) -> None:
    before = [card(0, own=GIB, device=0), card(0, device=1), card(0, own=GIB, device=2), card(0, own=GIB, device=3)]
    after = [card(GIB // 2, device=0), card(7, device=1), card(GIB, device=2)]
    with caplog.at_level(logging.WARNING):
        _, missing = await run(before, after, timeout_s=0.02)
    assert missing == {0: GIB // 2, 3: None}
    assert f"device 0: {GIB // 2 // MIB} MiB of the last engine's memory is not back" in caplog.text
    assert "device 3: an unknown amount" in caplog.text


async def test_without_time_one_sample_decides() -> None:
    assert await run([card(0, own=GIB)], [card(GIB)], timeout_s=0.0) == (1, {})
    assert await run([card(0, own=GIB)], [card(7)], timeout_s=0.0) == (1, {0: GIB - 7})
