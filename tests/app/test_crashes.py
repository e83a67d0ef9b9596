"""What recovery does beyond starting again: hangs, engines that outlive a kill, cards that settle, plans with less."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.boot import Boot
from app.card_lock import CardLocks
from app.errors import ApiError, EngineUnavailable
from app.patience import Backoff, Patience
from app.scheduler import Limits
from app.settle import CardReading
from engine.config import EngineConfig
from engine.errors import EngineDied, LoadRefused
from engine.fake import FakeEngine
from engine.messages import DeviceReady, Ledger, LoadProgress
from tests.app.recovering import QUICK, TEXT, Bench, text

GIB = 1 << 30
OTHERS = Patience(Backoff(first_s=0.0))


def card(device: int = 0) -> DeviceReady:
    return DeviceReady(device, f"GPU-{device}", "card", [device], 16 * GIB, GIB, {}, 0, 0, 0)


# Hangs.


async def test_an_engine_that_hangs_is_killed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.at_step({(1, 10): lambda engine: engine.hang()})
    await bench.supervisor.start()
    assert await asyncio.gather(text(bench.admit(50)), text(bench.admit(60))) == [TEXT[:50], TEXT[:60]]
    assert bench.diary.of("restarted") == ["hang"]
    assert bench.diary.of("ended") == [("engine_fault", "ok")]
    assert "it has work and has done no step for" in caplog.text
    assert bench.engines[0]._ended.result() == "killed"
    await bench.finish()


async def test_an_engine_without_work_may_be_silent() -> None:
    bench = Bench()
    await bench.supervisor.start()
    await text(bench.admit(5))
    await asyncio.sleep(4 * QUICK.hang_s)
    assert bench.generations == [1]
    await bench.finish()


async def test_an_engine_whose_steps_are_long_is_given_its_time() -> None:
    """Each step takes longer than the least that counts as a hang; but they have always taken so long."""
    bench = Bench(step_s=0.08)
    await bench.supervisor.start()
    assert await text(bench.admit(5)) == TEXT[:5]
    assert bench.generations == [1]
    await bench.finish()


async def test_one_that_hangs_while_it_loads_is_replaced() -> None:
    bench = Bench({2: {"hangs_in": "load"}})
    bench.die_at((1, 10))
    await bench.supervisor.start()
    assert await text(bench.admit(50)) == TEXT[:50]
    assert bench.generations == [1, 2, 3]
    await bench.finish()


async def test_one_that_says_how_far_it_is_may_load_for_long() -> None:
    bench = Bench({2: {"hangs_in": "load"}})
    bench.die_at((1, 10))
    await bench.supervisor.start()
    reading = asyncio.create_task(text(bench.admit(50)))
    await bench.until(lambda: len(bench.engines) == 2)
    for _ in range(8):
        await asyncio.sleep(QUICK.start_s / 4)
        bench.engines[1].events.on_progress(LoadProgress("weights", 1, 9))
    assert bench.generations == [1, 2]
    assert await reading == TEXT[:50]
    await bench.finish()


# An engine that cannot be killed.


async def test_stuck_until_it_is_reaped(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench({1: {"unkillable": True}})
    bench.at_step({(1, 10): lambda engine: engine.hang()})
    await bench.supervisor.start()
    reading = asyncio.create_task(text(bench.admit(50)))
    await bench.until(lambda: bench.supervisor.phase == "stuck")
    assert "Xid" in caplog.text
    await asyncio.sleep(2 * QUICK.reap_s)
    assert bench.engines[-1].config is None, "nothing is loaded while the last one holds its memory"
    assert bench.supervisor.status()["phase"] == "teardown"
    bench.engines[0].reap()
    assert await reading == TEXT[:50]
    assert bench.supervisor.phase == "ready"
    await bench.until_quiet()
    await bench.finish()


async def test_one_that_does_not_end_when_asked_may_be_stuck_too() -> None:
    bench = Bench({1: {"unkillable": True, "hangs_in": "stop"}})
    bench.reload_at((1, 10))
    await bench.supervisor.start()
    reading = asyncio.create_task(text(bench.admit(50)))
    await bench.until(lambda: bench.supervisor.phase == "stuck")
    bench.engines[0].reap()
    assert await reading == TEXT[:50]
    await bench.until_quiet()
    assert bench.diary.of("ended") == [("operator", "ok")]
    await bench.finish()


async def test_the_service_ends_although_its_engine_does_not(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench({1: {"unkillable": True}})
    bench.at_step({(1, 10): lambda engine: engine.hang()})
    await bench.supervisor.start()
    generation = bench.admit(50)
    await bench.until(lambda: bench.supervisor.phase == "stuck")
    async with asyncio.timeout(5):
        await bench.supervisor.stop(0.01)
    assert "generation=1 is left behind" in caplog.text
    with pytest.raises(ApiError):
        await text(generation)


# Memory that comes back.


class Cards:
    """What is free grows by `returns` with each sample after an engine's end, up to `free`."""

    def __init__(self, bench_of: list[Bench], own: int | None, free: int, returns: int) -> None:
        self._benches = bench_of
        self._own = own
        self._free = free
        self._returns = returns
        self.now = GIB
        self.at_load: list[int] = []

    async def sample(self) -> Sequence[CardReading]:
        if self._benches[0].engines[0]._ended.done():
            self.now = min(self._free, self.now + self._returns)
        return [self._reading(), CardReading(7, "GPU-of-others", 5, None)]

    def latest(self) -> Sequence[CardReading]:
        return [self._reading()]

    def _reading(self) -> CardReading:
        return CardReading(0, "GPU-0", self.now, self._own)


def with_cards(own: int | None, free: int, returns: int, **options: Any) -> tuple[Bench, Cards]:
    benches: list[Bench] = []
    cards = Cards(benches, own, free, returns)
    bench = Bench(devices=[card()], parts={"cards": cards}, **options)
    benches.append(bench)

    def note(engine: FakeEngine, stage: str) -> None:
        if stage == "weights" and engine.generation > 1:
            cards.at_load.append(cards.now)

    bench.on_stage = note
    return bench, cards


@pytest.mark.parametrize(("own", "expected"), [(8 * GIB, 9 * GIB), (None, 9 * GIB)])
async def test_the_successor_loads_once_the_memory_is_back(own: int | None, expected: int) -> None:
    bench, cards = with_cards(own, free=9 * GIB, returns=2 * GIB, patience=OTHERS)
    bench.reload_at((1, 10))
    await bench.supervisor.start()
    assert await text(bench.admit(50)) == TEXT[:50]
    await bench.until_quiet()
    assert cards.at_load == [expected]
    await bench.until(lambda: bool(bench.diary.of("returned")))
    assert bench.diary.of("returned") == [(0, 8 * GIB)], "of our own card"
    await bench.finish()


async def test_after_a_crash_what_was_read_before_counts() -> None:
    bench, cards = with_cards(8 * GIB, free=9 * GIB, returns=GIB, patience=patient(tick_s=0.01))
    await bench.supervisor.start()
    await asyncio.sleep(0.05)
    bench.engines[0].kill()
    await bench.until(lambda: len(bench.engines) == 2 and bench.supervisor.phase == "ready")
    assert cards.at_load == [9 * GIB]
    await bench.finish()


def patient(**changes: float) -> Patience:
    return Patience(Backoff(first_s=0.0), **changes)


async def test_memory_that_does_not_come_back_is_planned_without(caplog: pytest.LogCaptureFixture) -> None:
    bench, cards = with_cards(8 * GIB, free=5 * GIB, returns=4 * GIB)
    bench.reload_at((1, 10))
    await bench.supervisor.start()
    assert await text(bench.admit(50)) == TEXT[:50]
    assert cards.at_load == [5 * GIB]
    assert "4096 MiB of the last engine's memory is not back" in caplog.text
    await bench.until_quiet()
    await bench.finish()


async def test_loads_take_turns_on_a_card(tmp_path: Path) -> None:
    locks = CardLocks(tmp_path)
    bench, _ = with_cards(None, free=GIB, returns=0, patience=OTHERS)
    bench.supervisor._starter._locks = locks
    async with locks.held(["GPU-0"]):
        start = asyncio.create_task(bench.supervisor.start())
        await asyncio.sleep(0.02)
        assert bench.engines[0].config is None, "another service loads"
    await start
    async with locks.held(["GPU-0"]):
        assert await text(bench.admit(5)) == TEXT[:5], "whoever serves holds nothing"
    await bench.finish()


# Plans with less.


async def test_a_load_that_fails_is_tried_with_less_and_less() -> None:
    refusal = {"load_error": LoadRefused("DoesNotFit", "no room")}
    boot = Boot()
    config = EngineConfig(model_path="fake")
    bench = Bench({2: refusal, 3: refusal, 4: refusal}, config=config, parts={"boot": boot})
    bench.die_at((1, 10))
    await bench.supervisor.start()
    assert await text(bench.admit(50)) == TEXT[:50]
    loaded = [engine.config for engine in bench.engines]
    assert [(c.max_context, c.kv_dtype, c.without) for c in loaded if c is not None] == [
        (None, "auto", ()),
        (None, "auto", ()),
        (4096, "f32", ()),
        (None, "auto", ("shadow",)),
        (None, "auto", ("shadow", "graph buckets")),
    ]
    assert boot.without == ("shadow", "graph buckets")
    bench.engines[-1].die("again")
    await bench.until(lambda: len(bench.engines) == 6 and bench.supervisor.phase == "ready")
    assert bench.engines[-1].config.without == boot.without, "a crash brings nothing back"  # type: ignore[union-attr]
    bench.supervisor.reload("operator")
    await bench.until_quiet()
    assert bench.engines[-1].config == config, "an operator may know better"
    assert boot.without == ()
    await bench.finish()


async def test_never_below_what_the_requests_at_hand_need() -> None:
    bench = Bench({2: {"max_context": 60}, 3: {"max_context": 151}})
    bench.die_at((1, 10))
    await bench.supervisor.start()
    assert await text(bench.admit(150)) == TEXT[:150]
    assert bench.generations == [1, 2, 3]
    assert bench.engines[1]._ended.result() == "stopped"
    assert bench.supervisor.ready is not None
    assert bench.supervisor.ready.max_context == 151
    await bench.finish()


async def test_the_first_engine_is_started_without_what_was_dropped(tmp_path: Path) -> None:
    boot = Boot(tmp_path, "f")
    boot.left_out(("shadow",))
    bench = Bench(parts={"boot": boot})
    await bench.supervisor.start()
    assert bench.engines[0].config.without == ("shadow",)  # type: ignore[union-attr]
    await bench.finish()


@pytest.mark.parametrize("young_s", [60.0, 0.0])
async def test_a_start_is_proved_by_a_token_or_by_its_age(tmp_path: Path, young_s: float) -> None:
    boot = Boot(tmp_path, "f")
    boot.begin()
    bench = Bench(patience=Patience(Backoff(young_s=young_s), tick_s=0.01), parts={"boot": boot})
    await bench.supervisor.start()
    await asyncio.sleep(0.05)
    assert (boot._attempt is None) is (young_s == 0.0)
    await text(bench.admit(1))
    assert boot._attempt is None
    await bench.finish()


# Requests.


@pytest.mark.parametrize("where", [0, 7, 31])
async def test_one_poisonous_request_among_many(where: int) -> None:
    """Exactly one fails; all others are whole."""
    bench = Bench(patience=Patience(Backoff(first_s=0.0)), max_batch=32, poison=66)
    await bench.supervisor.start()
    others = [bench.admit(40 + n) for n in range(31)]
    running = [asyncio.create_task(text(generation)) for generation in others[:where]]
    if where == 7:
        await bench.until(lambda: bench.engines[0].steps > 10)
    poison = asyncio.create_task(text(bench.admit(50, prompt=[66])))
    running += [asyncio.create_task(text(generation)) for generation in others[where:]]
    with pytest.raises(ApiError) as caught:
        await poison
    assert caught.value.code == "poison"
    assert await asyncio.gather(*running) == [TEXT[: 40 + n] for n in range(31)]
    assert sorted(bench.diary.outcomes, key=str) == ["failed"] + ["length"] * 31
    assert len(bench.engines) <= 10
    await bench.until_quiet()
    await bench.finish()


async def test_a_new_request_waits_while_suspects_are_tried() -> None:
    bench = Bench(patience=OTHERS, poison=66)
    await bench.supervisor.start()
    poison = asyncio.create_task(text(bench.admit(50, prompt=[66])))
    await bench.until(lambda: len(bench.engines) == 3)
    innocent = bench.admit(20)
    with pytest.raises(ApiError):
        await poison
    assert await text(innocent) == TEXT[:20]
    assert innocent.choices[0].resumed == 0
    await bench.finish()


async def test_out_of_memory_costs_one_request() -> None:
    bench = Bench()
    await bench.supervisor.start()
    victim, other = bench.admit(50), bench.admit(50)
    bench.at_step({(1, 10): lambda engine: engine.fail(victim.choices[0].sequence, "oom_alone")})
    reading = asyncio.create_task(text(other))
    with pytest.raises(ApiError) as caught:
        await text(victim)
    assert caught.value.code == "oom_alone"
    assert await reading == TEXT[:50]
    assert bench.generations == [1]
    await bench.finish()


async def test_the_shortest_goes_on_first() -> None:
    bench = Bench({2: {"max_batch": 1}})
    bench.die_at((1, 10))
    await bench.supervisor.start()
    long, short, middle = (bench.admit(50, prompt=[1] * length) for length in (100, 1, 10))
    ends: list[str] = []

    async def read(name: str, generation: Any) -> None:
        assert await text(generation) == TEXT[:50]
        ends.append(name)

    await asyncio.gather(read("long", long), read("short", short), read("middle", middle))
    assert ends == ["short", "middle", "long"]
    assert bench.diary.recomputed_tokens == 100 + 1 + 10 + 3 * 10
    await bench.finish()


async def test_arrivals_are_held_for_so_long_and_no_longer() -> None:
    bench = Bench({2: {"hangs_in": "load"}}, limits=Limits(hold_s=0.05), patience=OTHERS)
    await bench.supervisor.start()
    running = bench.admit(50)
    bench.engines[0].die("told to")
    await bench.until(lambda: bench.supervisor.phase == "recovering")
    late = bench.admit(50)
    assert bench.scheduler.held == 2
    with pytest.raises(EngineUnavailable) as caught:
        await late.admitted()
    assert 1 <= int(caught.value.headers["retry-after"]) <= 60
    assert not late.is_admitted
    assert bench.diary.outcomes == [], "who was never admitted is not lost"
    (held_s,) = bench.diary.held_s
    assert held_s >= 0.04
    bench.engines[1].kill()
    assert await text(running) == TEXT[:50]
    await bench.until_quiet()
    await bench.finish()


async def test_the_ledger_of_the_moment() -> None:
    bench = Bench()
    await bench.supervisor.start()
    bench.engines[0].events.on_ledger(Ledger([{"kv_cache": 1}]))
    assert bench.supervisor.ledger == Ledger([{"kv_cache": 1}])
    bench.engines[0].kill()
    await bench.until(lambda: bench.supervisor.engine is bench.engines[-1] and len(bench.engines) == 2)
    bench.engines[0].events.on_ledger(Ledger([{"kv_cache": 2}]))
    assert bench.supervisor.ledger is None
    await bench.finish()


async def test_every_start_that_fails_is_said(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench({2: {"load_error": EngineDied("exploded")}})
    bench.die_at((1, 10))
    await bench.supervisor.start()
    with caplog.at_level(logging.ERROR):
        assert await text(bench.admit(50)) == TEXT[:50]
    assert "engine generation=2 did not start: exploded" in caplog.text
    await bench.finish()
