"""Silence and its limits, with made-up clocks."""

import pytest

from app.hang import HangWatch
from engine.messages import StepStats


def stats(seconds: float, decode: int = 1, prefill: int = 0) -> StepStats:
    return StepStats(1, 0, decode, prefill, 0, 0, 1, 0, 0, 0, seconds)


class Clock:
    def __init__(self, hang_s: float = 30.0, tick_s: float = 1.0) -> None:
        self.watch = HangWatch(hang_s, tick_s, largest_chunk=4096)
        self.now = 100.0

    def silence(self, most: int = 10_000, *, busy: bool = True, prefill: int = 0, tick: float = 1.0) -> int | None:
        """After how many looks the engine is said to have stopped."""
        for look in range(1, most + 1):
            self.now += tick
            if self.watch.look(self.now, busy=busy, prefill_tokens=prefill) is not None:
                return look
        return None


def test_short_steps_hang_after_hang_seconds() -> None:
    clock = Clock()
    clock.watch.step(stats(0.01))
    assert clock.silence() == 31


def test_the_limit_is_twenty_times_the_longest_step_of_its_kind() -> None:
    clock = Clock()
    clock.watch.step(stats(4.0, decode=3))
    clock.watch.step(stats(0.1, decode=3))
    clock.watch.step(stats(9.0, decode=3, prefill=512))
    assert clock.watch.limit_s(0) == 80
    assert clock.watch.limit_s(512) == 180
    assert clock.watch.limit_s(10) == 180, "as long as any chunk took"
    assert clock.silence() == 81
    clock.watch.begin()
    assert clock.silence(prefill=512) == 181


def test_a_longer_chunk_may_take_longer_than_any_before() -> None:
    watch = HangWatch(30.0, 1.0, largest_chunk=4096)
    watch.step(stats(2.0, decode=0, prefill=10))
    assert watch.limit_s(100) == pytest.approx(20 * 20.0)
    assert watch.limit_s(1_000_000) == pytest.approx(20 * 0.2 * 4096), "a step takes no more than a chunk"


def test_before_any_prompt_a_token_may_take_as_long_as_a_step() -> None:
    watch = HangWatch(30.0, 1.0, largest_chunk=4096)
    watch.step(stats(0.1))
    assert watch.limit_s(1000) == pytest.approx(20 * 100)


def test_before_anything_is_known_the_machine_may_be_slow() -> None:
    assert Clock().silence() == 601


def test_a_step_and_a_rest_break_the_silence() -> None:
    clock = Clock()
    clock.watch.step(stats(0.01))
    assert clock.silence(29) is None
    clock.watch.step(stats(0.01))
    assert clock.silence(29) is None
    assert clock.silence(1, busy=False) is None
    assert clock.silence(29) is None
    clock.watch.begin()
    assert clock.silence() == 31


def test_time_in_which_the_service_was_stopped_does_not_count() -> None:
    clock = Clock()
    clock.watch.step(stats(0.01))
    assert clock.silence(20) is None
    clock.now += 3600
    assert clock.silence() == 31 - 20
    late = Clock()
    late.watch.step(stats(0.01))
    assert late.silence(tick=1.9) == 17, "a loop that is merely late is no excuse"
