"""Planned reloads over fake engines: every stage, every way in which it may go wrong there."""

import asyncio
from typing import Any

import pytest

from app.boot import Boot
from app.errors import EngineLoading, EngineUnavailable, ShutDown
from app.patience import Backoff, Patience
from app.recovery import ReloadInProgress
from app.reload import Reload, Reloads
from engine.errors import EngineDied, HandshakeError, LoadRefused
from engine.fake import FakeEngine
from tests.app.recovering import TEXT, Bench, Diary, text

STAGES = [(2, "prepare"), (1, "checkpoint"), (2, "weights"), (2, "load"), (2, "warmup")]
PHASES = ["drain", "checkpoint", "teardown", "load", "warmup", "replay", "total"]


async def reloaded(bench: Bench, *lengths: int) -> None:
    """Streams run over everything that happens, and their texts are whole."""
    await bench.supervisor.start()
    streams = [bench.admit(length) for length in lengths or (100, 150, 70)]
    texts = await asyncio.gather(*map(text, streams))
    assert texts == [TEXT[: record.request.max_tokens] for stream in streams for record in stream.choices]
    await bench.until_quiet()
    assert bench.supervisor.phase == "ready"
    assert set(bench.diary.outcomes) == {"length"}


async def test_streams_go_on_in_the_successor() -> None:
    bench = Bench()
    bench.reload_at((1, 10))
    stages: list[tuple[int, str]] = []
    bench.on_stage = lambda engine, stage: stages.append((engine.generation, stage))
    await reloaded(bench)
    assert stages[-5:] == STAGES
    assert bench.engines[1].restored == 3, "the blocks of three sequences"
    assert bench.diary.said == [
        ("begun", "operator"),
        ("interrupted", 0, 3),
        ("restarted", "operator"),
        ("ended", "operator", "ok"),
    ]
    assert sorted(bench.diary.phases) == sorted(PHASES)
    assert bench.cleared >= 2, "the memory is given back"
    assert bench.supervisor.engine is bench.engines[1]
    await bench.finish()


async def test_reload_after_reload_and_crash_in_one_streams_life() -> None:
    bench = Bench()
    bench.at_step(
        {
            (1, 10): lambda engine: bench.supervisor.reload("operator"),
            (2, 5): lambda engine: engine.die("told to"),
            (3, 20): lambda engine: bench.supervisor.reload("vram_growth"),
            (4, 1): lambda engine: engine.die("told to"),
        }
    )
    await reloaded(bench)
    assert bench.generations == [1, 2, 3, 4, 5]
    assert bench.diary.of("ended") == [
        ("operator", "ok"),
        ("engine_fault", "ok"),
        ("vram_growth", "ok"),
        ("engine_fault", "ok"),
    ]
    assert bench.diary.of("restarted") == ["operator", "crash", "reload", "crash"]
    await bench.finish()


async def test_an_idle_engine_is_reloaded_too() -> None:
    bench = Bench()
    await bench.supervisor.start()
    bench.supervisor.reload("vram_floor")
    await bench.until_quiet()
    assert bench.generations == [1, 2]
    assert bench.engines[1].restored == 0
    assert await text(bench.admit(30)) == TEXT[:30]
    await bench.finish()


async def test_what_is_said_of_it() -> None:
    boot = Boot(reloads_per_hour=3)
    bench = Bench(parts={"boot": boot})
    await bench.supervisor.start()
    quiet = {"in_progress": False, "phase": None, "reason": None, "started_at": None}
    assert bench.supervisor.status() == {**quiet, "generation": 1, "last": None, "budget_left": 3}
    begun = bench.supervisor.reload("vram_growth")
    assert begun == {"id": "reload-1", "generation": 2, "phase": "prepare"}
    with pytest.raises(ReloadInProgress) as caught:
        bench.supervisor.reload("operator")
    assert caught.value.progress == begun
    status = bench.supervisor.status()
    assert (status["in_progress"], status["phase"], status["generation"]) == (True, "prepare", 2)
    assert (status["reason"], status["budget_left"]) == ("vram_growth", 2)
    assert status["started_at"].endswith("Z")
    await bench.until_quiet()
    status = bench.supervisor.status()
    last = status.pop("last")
    assert status == {**quiet, "generation": 2, "budget_left": 2}
    assert (last["reason"], last["result"]) == ("vram_growth", "ok")
    assert list(last["phases"]) == [phase for phase in PHASES if phase != "total"]
    assert last["seconds"] == pytest.approx(sum(last["phases"].values()), abs=1e-3)
    assert bench.supervisor.reload("operator")["id"] == "reload-2"
    assert bench.supervisor.status()["budget_left"] == 2, "an operator's costs nothing"
    await bench.finish()


async def test_no_engine_no_reload() -> None:
    bench = Bench({1: {"hangs_in": "load"}})
    start = asyncio.create_task(bench.supervisor.start())
    await bench.until(lambda: bool(bench.engines))
    with pytest.raises(EngineLoading):
        bench.supervisor.reload("operator")
    start.cancel()
    await bench.supervisor.stop(1)
    with pytest.raises(EngineUnavailable):
        bench.supervisor.reload("operator")
    bench = Bench({1: {"load_error": EngineDied("no")}})
    with pytest.raises(EngineDied):
        await bench.supervisor.start()
    with pytest.raises(EngineUnavailable):
        bench.supervisor.reload("operator")
    await bench.finish()


@pytest.mark.parametrize("fault", [{"dies_in": "prepare"}, {"hangs_in": "prepare"}])
async def test_a_successor_that_cannot_be_prepared_leaves_the_old_one_at_work(fault: dict[str, Any]) -> None:
    bench = Bench({2: fault}, step_s=0.002)
    bench.reload_at((1, 10))
    await reloaded(bench, 200)
    assert bench.supervisor.engine is bench.engines[0]
    assert bench.diary.said == [("begun", "operator"), ("ended", "operator", "aborted")]
    assert bench.diary.phases == []
    assert bench.engines[1]._ended.done()
    bench.supervisor.reload("operator")
    await bench.until_quiet()
    assert bench.supervisor.engine is bench.engines[2]
    await bench.finish()


async def test_changed_files_abort_it() -> None:
    """The old engine works on with the old files; the next crash is another matter."""
    bench = Bench()

    def stage(engine: FakeEngine, stage: str) -> None:
        if (engine.generation, stage) == (2, "prepare"):
            raise HandshakeError("files were changed: restart the service")

    bench.on_stage = stage
    bench.reload_at((1, 10))
    await reloaded(bench)
    assert bench.diary.of("ended") == [("operator", "aborted")]
    await bench.finish()


@pytest.mark.parametrize(
    ("fault", "generations"),
    [
        ({2: {"dies_in": "load"}}, 3),
        ({2: {"hangs_in": "load"}}, 3),
        ({2: {"dies_in": "load"}, 3: {"dies_in": "prepare"}, 4: {"load_error": LoadRefused("DoesNotFit", "no")}}, 5),
        ({1: {"dies_in": "checkpoint"}}, 2),
        ({1: {"hangs_in": "checkpoint"}}, 2),
        ({1: {"hangs_in": "stop"}}, 2),
    ],
)
async def test_whatever_goes_wrong_the_streams_go_on(fault: dict[int, Any], generations: int) -> None:
    bench = Bench(fault)
    bench.reload_at((1, 10))
    await reloaded(bench)
    assert len(bench.engines) == generations
    assert bench.diary.of("ended") == [("operator", "ok")]
    assert bench.diary.of("restarted") == ["operator"]
    assert all(engine._ended.done() for engine in bench.engines[:-1])
    await bench.finish()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("victim", [1, 2])
async def test_a_death_in_every_stage(stage: tuple[int, str], victim: int) -> None:
    """Of the old engine, or of the new one, whichever stage the other is at."""
    bench = Bench()

    def kill(engine: FakeEngine, name: str) -> None:
        if (engine.generation, name) == stage:
            bench.engines[victim - 1].kill()

    bench.on_stage = kill
    bench.reload_at((1, 10))
    await reloaded(bench)
    is_new = victim == 2
    aborted = stage == (2, "prepare") and is_new
    assert bench.diary.of("ended") == [("operator", "aborted" if aborted else "ok")]
    assert len(bench.engines) == (3 if is_new and not aborted else 2)
    await bench.finish()


@pytest.mark.parametrize("stage", [*STAGES, (3, "prepare"), (3, "weights")])
async def test_the_service_may_stop_in_every_stage(stage: tuple[int, str]) -> None:
    faults = {2: {"dies_in": "load"}} if stage[0] == 3 else {}
    bench = Bench(faults)
    stopping: list[asyncio.Task[None]] = []

    def stop(engine: FakeEngine, name: str) -> None:
        if (engine.generation, name) == stage and not stopping:
            stopping.append(asyncio.create_task(bench.supervisor.stop(1)))

    bench.on_stage = stop
    await bench.supervisor.start()
    bench.reload_at((1, 10))
    with pytest.raises(ShutDown):
        await text(bench.admit(400))
    await stopping[0]
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert all(engine._ended.done() for engine in bench.engines)
    assert bench.diary.of("ended") == [("operator", "aborted")]
    assert bench.supervisor.phase == "stopped"
    assert bench.scheduler.inflight_bytes == 0


PATIENT = Patience(Backoff(first_s=0.0))


async def test_the_service_may_stop_during_a_replay() -> None:
    bench = Bench({2: {"step_s": 60.0}}, patience=PATIENT)
    bench.reload_at((1, 10))
    await bench.supervisor.start()
    reading = asyncio.create_task(text(bench.admit(400)))
    await bench.until(lambda: bench.supervisor.status()["phase"] == "replay")
    await bench.supervisor.stop(1)
    with pytest.raises(ShutDown):
        await reading
    assert bench.diary.of("ended") == [("operator", "aborted")]


async def test_one_at_a_time_until_everything_has_gone_on() -> None:
    """The replay is part of it; an engine that dies in it ends it, and the crash is another."""
    bench = Bench({2: {"step_s": 60.0}}, patience=PATIENT)
    bench.reload_at((1, 10))
    await bench.supervisor.start()
    reading = asyncio.create_task(text(bench.admit(50)))
    await bench.until(lambda: bench.supervisor.status()["phase"] == "replay")
    with pytest.raises(ReloadInProgress):
        bench.supervisor.reload("operator")
    bench.engines[1].kill()
    assert await reading == TEXT[:50]
    await bench.until_quiet()
    assert bench.diary.of("ended") == [("operator", "ok"), ("engine_fault", "ok")]
    await bench.finish()


async def test_a_stream_that_is_cancelled_in_the_drain_is_not_waited_for() -> None:
    bench = Bench()
    await bench.supervisor.start()
    generation = bench.admit(400)
    bench.on_stage = lambda engine, stage: generation.cancel() if stage == "checkpoint" else None
    bench.reload_at((1, 10))
    await text(generation)
    await bench.until_quiet()
    assert bench.diary.of("ended") == [("operator", "ok")]
    assert bench.diary.of("interrupted") == [(0, 0)]
    await bench.finish()


def test_phases_add_up_and_may_come_again() -> None:
    diary = Diary()
    reload = Reload(1, "operator", "operator", 2, diary)
    for phase in ("drain", "teardown", "load", "warmup", "load", "replay"):
        reload.enter(phase)  # type: ignore[arg-type]
    report = reload.end("ok")
    assert list(report.phases) == ["drain", "teardown", "load", "warmup", "replay"]
    assert report.seconds == pytest.approx(sum(report.phases.values()))
    assert diary.phases == [*report.phases, "total"]


def test_an_outage_is_expected_to_be_like_the_last_one() -> None:
    reloads = Reloads(Diary())
    assert reloads.outage_left_s("drain") is None
    reloads.expect({"drain": 1.0, "load": 4.0, "warmup": 2.0, "replay": 100.0})
    assert [reloads.outage_left_s(phase) for phase in ("drain", "teardown", "load", "warmup")] == [7.0, 6.0, 6.0, 2.0]


async def test_whoever_is_sent_away_is_told_when_to_come_back() -> None:
    bench = Bench({2: {"hangs_in": "load"}}, patience=PATIENT)
    await bench.supervisor.start()
    bench.supervisor._reloads.expect({"load": 25.0, "replay": 500.0})
    bench.supervisor.reload("operator")
    await bench.until(lambda: bench.supervisor.status()["phase"] == "load")
    assert bench.scheduler.retry_after_s == pytest.approx(25.0, abs=1.0)
    await bench.finish()


@pytest.mark.parametrize("turns", range(1, 40, 3))
@pytest.mark.parametrize("deed", ["reload", "die"])
async def test_arrivals_at_any_turn_of_it_are_answered(turns: int, deed: str) -> None:
    bench = Bench()
    await bench.supervisor.start()
    running = asyncio.create_task(text(bench.admit(60)))
    await asyncio.sleep(0)
    if deed == "reload":
        bench.supervisor.reload("operator")
    else:
        bench.engines[0].kill()
    for _ in range(turns):
        await asyncio.sleep(0)
    late = bench.admit(10)
    assert await text(late) == TEXT[:10]
    assert await running == TEXT[:60]
    assert len(bench.diary.held_s) <= 1
    await bench.until_quiet()
    await bench.finish()


async def test_a_bug_before_the_drain_leaves_the_engine_at_work(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()

    def broken() -> int:
        raise ValueError("/proc/meminfo: there is no MemAvailable")

    bench.budget_bytes = broken  # type: ignore[method-assign]
    bench.reload_at((1, 10))
    await reloaded(bench)
    assert bench.supervisor.engine is bench.engines[0]
    assert bench.engines[1]._ended.done()
    assert bench.diary.of("ended") == [("operator", "aborted")]
    assert "there is no MemAvailable" in caplog.text
    await bench.finish()
