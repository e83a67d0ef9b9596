"""From snapshots to decisions, actions and status, without a thread and without a clock."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from engine.memory.simulated_gpus import SimulatedCard, SimulatedGpus
from tests.watchdog.scripted import Scripted
from watchdog.actions import Action, Outcome, Regrow, Reload, Rung, Trim
from watchdog.attribution import Ours
from watchdog.config import WatchdogConfig
from watchdog.counts import Counts
from watchdog.metrics import alone
from watchdog.runner import DevicePlan, Runner
from watchdog.sampler import Sampler
from watchdog.simulated import Loss, SimulatedSource
from watchdog.snapshot import GIB, MIB, Elastic, Holdings, Work
from watchdog.state import Decision, EnginePhase, State
from watchdog.status import as_json

ENGINE = Ours(frozenset({7}), "nvml")
PLANS = [DevicePlan(512 * MIB, stages=(0,)), DevicePlan(512 * MIB, stages=(1,))]


class Bench:
    """A runner over a scripted source; `tick` is a second of a service with one request at a time."""

    def __init__(self, **settings: object) -> None:
        self.source = Scripted()
        self.sampler = Sampler(self.source, self.source.clock)
        self.begun: list[Action] = []
        self.counts = Counts(devices=2)
        self.runner = Runner(self.sampler, WatchdogConfig(**settings), self, self.counts)  # type: ignore[arg-type]
        self.holdings = [Holdings(1), Holdings(1)]
        self.finished = 0
        self.engine: EnginePhase = "serving"

    def begin(self, action: Action) -> None:
        self.begun.append(action)

    def ready(self) -> None:
        self.runner.ready(PLANS, ENGINE)
        self.source.now += 0.1

    def observe(self) -> list[Decision]:
        work = Work(0, self.finished, 0, boundary=True)
        return self.runner.observe(self.source.now, work, self.holdings, self.engine)

    def tick(self, free: int | None = None, device: int = 1) -> list[Decision]:
        if free is not None:
            self.source.free[device] = free
            self.source.held = {7: 16 * GIB - free}
        self.source.now += 1.0
        self.finished += 1
        self.sampler.sample()
        return self.observe()

    def status(self, device: int = 1):
        return self.runner.status(self.source.now, 1000.0).devices[device]


@pytest.fixture
def bench() -> Bench:
    """Two devices that began with 480 MiB of idle free memory, R = 512."""
    bench = Bench()
    bench.source.free = [480 * MIB, 480 * MIB]
    bench.ready()
    bench.tick(480 * MIB)
    return bench


def test_before_an_engine_is_ready_readings_are_shown_and_nothing_is_decided() -> None:
    bench = Bench()
    bench.engine = "loading"
    assert bench.tick() == []
    status = bench.status()
    assert status.reading is not None
    assert (status.state, status.floors, status.idle_free) == (State.RELOAD, None, None)


def test_the_baseline_is_of_a_pass_that_began_after_ready() -> None:
    bench = Bench()
    bench.tick(9 * GIB)
    bench.ready()
    assert bench.observe() == []
    assert bench.status().floors is None, "what was read before is of another engine"
    bench.tick(480 * MIB)
    status = bench.status()
    assert (status.baseline_free, status.idle_free, status.stages) == (480 * MIB, 480 * MIB, (1,))
    assert status.reading is not None
    assert status.reading.own == 16 * GIB - 480 * MIB


def test_a_sample_counts_once_however_often_it_is_looked_at(bench: Bench) -> None:
    assert bench.tick(100 * MIB)
    for _ in range(5):
        assert bench.observe() == []
    bench.tick(100 * MIB)
    assert bench.begun == []
    bench.tick(100 * MIB)
    assert bench.begun, "three samples confirm it"


def test_an_action_is_begun_once_and_told_before_the_next(bench: Bench) -> None:
    for _ in range(6):
        bench.tick(100 * MIB)
    assert bench.begun == [Trim(1, Rung.POOLS)]
    trim = bench.begun[0]
    assert isinstance(trim, Trim)
    bench.runner.told(Outcome(trim, bench.source.now, "ok", 40 * MIB, 0.2), bench.holdings[1])
    bench.tick(100 * MIB)
    assert bench.begun[1] == Trim(1, Rung.STACK_LIMIT)
    assert bench.counts.trims["1", "pools", "ok"] == 1
    assert bench.counts.trim_returned["1", "pools"] == 40 * MIB
    assert bench.counts.trim_seconds[("pools",)].counts[5] == 1


def test_a_dry_run_begins_nothing() -> None:
    bench = Bench(mode="dry-run")
    bench.source.free = [480 * MIB, 480 * MIB]
    bench.ready()
    bench.tick(480 * MIB)
    decisions = [decision for _ in range(10) for decision in bench.tick(70 * MIB)]
    assert any(decision.action is not None and decision.dry_run for decision in decisions)
    assert bench.begun == []


def test_a_blind_device_is_not_acted_on_and_the_other_is_watched(bench: Bench) -> None:
    bench.source.broken[1] = "lost"
    bench.source.free[1] = 10 * MIB
    for _ in range(10):
        decisions = bench.tick()
    assert [decision.state for decision in decisions] == [State.OK, State.BLIND]
    assert bench.begun == []
    status = bench.status()
    assert (status.reading, status.idle_free, status.forecast) == (None, None, None)
    assert status.floors is not None, "what was told at ready remains"
    row = as_json(bench.runner.status(bench.source.now, 0.0))[1]
    assert (row["free"], row["state"], row["error"], row["age_seconds"]) == (None, "blind", "lost", 10.0)
    bench.source.broken.clear()
    bench.source.free[1] = 480 * MIB
    assert bench.tick()[1].state is State.OK


def test_a_sampler_that_hangs_makes_devices_blind_by_the_services_own_timer(bench: Bench) -> None:
    bench.source.now += 6.0
    assert [decision.state for decision in bench.observe()] == [State.BLIND, State.BLIND]


def test_a_device_that_is_blind_at_ready_begins_when_it_is_seen() -> None:
    bench = Bench()
    bench.source.free = [480 * MIB, 300 * MIB]
    bench.source.broken[1] = "lost"
    bench.ready()
    for _ in range(4):
        assert bench.tick() == []
    for _ in range(3):
        decisions = bench.tick()
    assert [decision.state for decision in decisions] == [State.OK, State.BLIND]
    assert bench.status().floors is None
    bench.source.broken.clear()
    bench.tick()
    assert bench.status().baseline_free == 300 * MIB


def test_reloads_spend_a_budget_that_outlives_the_engine() -> None:
    bench = Bench()
    bench.source.free = [480 * MIB, 480 * MIB]
    bench.ready()
    bench.tick(480 * MIB)
    for free in range(470, 60, -10):
        bench.tick(free * MIB)
        while bench.begun and not isinstance(bench.begun[-1], Reload):
            action = bench.begun.pop()
            bench.runner.told(Outcome(action, bench.source.now, "noop"), bench.holdings[1])  # type: ignore[arg-type]
        if bench.begun:
            break
    assert isinstance(bench.begun[-1], Reload)
    assert len(bench.runner.reloads) == 1
    bench.engine = "reloading"
    bench.tick(9 * GIB)
    assert bench.status().state is State.RELOAD
    bench.engine = "serving"
    bench.ready()
    bench.tick(480 * MIB)
    assert len(bench.runner.reloads) == 1
    assert bench.status().state is State.OK


def test_the_budget_of_an_earlier_service_counts() -> None:
    bench = Bench()
    runner = Runner(bench.sampler, WatchdogConfig(), bench, bench.counts, reloads=(99.0, 99.5))
    assert runner.reloads == (99.0, 99.5)
    bench.runner = runner
    bench.ready()
    bench.tick()
    assert runner.reloads == (99.0, 99.5)


def test_an_operators_reload_costs_no_budget_and_a_failed_one_is_over(bench: Bench) -> None:
    bench.runner.reload_begun(bench.source.now)
    bench.tick()
    assert bench.status().state is State.RELOAD
    bench.runner.reload_failed(bench.source.now)
    bench.tick()
    assert bench.status().state is State.OK
    assert bench.runner.reloads == ()


def test_off_decides_nothing_and_shows_readings(bench: Bench) -> None:
    bench.runner.set_mode("off")
    assert bench.runner.mode == "off"
    for _ in range(5):
        decisions = bench.tick(10 * MIB)
    assert {decision.state for decision in decisions} == {State.DISABLED}
    assert bench.begun == []
    assert bench.status().state is State.DISABLED
    assert bench.status().reading is not None


def test_a_ledger_is_completed_and_without_own_bytes_there_is_drift() -> None:
    bench = Bench()
    bench.source.free = [480 * MIB, 480 * MIB]
    bench.holdings = [Holdings(1, ledger={"weights": 8 * GIB, "kv_cache": 7 * GIB})] * 2
    bench.ready()
    bench.tick(480 * MIB)
    bench.tick(476 * MIB)
    status = bench.status()
    assert status.reading is not None
    assert sum(status.ledger.values()) == status.reading.own == 16 * GIB - 480 * MIB, "own is of the last look"
    assert status.ledger["unaccounted"] == GIB - 480 * MIB
    assert status.drift is None
    bench.source.held = None
    bench.sampler.request(processes=True)
    bench.holdings = [Holdings(1, ledger={"weights": 8 * GIB, "kv_cache": 6 * GIB})] * 2
    bench.source.free[1] = GIB + 470 * MIB
    bench.tick()
    status = bench.status()
    assert status.drift == -10 * MIB, "a GiB went out of the ledger, and 10 MiB less came back"
    assert "unaccounted" not in status.ledger


def test_holding_is_what_the_last_decisions_say(bench: Bench) -> None:
    assert not bench.runner.holds
    bench.holdings = [replace(Holdings(1), elastic=Elastic())] * 2
    runner = Runner(bench.sampler, WatchdogConfig(reload_per_hour=0), bench, bench.counts)
    bench.runner = runner
    bench.ready()
    bench.tick(480 * MIB)
    for free in range(470, 0, -10):
        bench.tick(free * MIB)
        while bench.begun:
            outcome = Outcome(bench.begun.pop(), bench.source.now, "noop")  # type: ignore[arg-type]
            runner.told(outcome, bench.holdings[1])
    assert bench.status().state is State.DEGRADED
    assert runner.holds


def test_nvml_lost_for_ten_seconds_on_one_of_two_devices(tmp_path: Path) -> None:
    """Blind alone, seen in the metrics, nothing done, and back."""
    gpus = SimulatedGpus.create(tmp_path / "gpus", [SimulatedCard(16 * GIB, 0)] * 2)
    for device in range(2):
        gpus.resize(device, "weights", 15 * GIB)
    source = SimulatedSource(tmp_path / "gpus", Loss(10.0, device=1))
    now = [0.0]
    sampler, begun, counts = Sampler(source, lambda: now[0]), [], Counts(2)
    actions = type("Recorder", (), {"begin": lambda self, action: begun.append(action)})()
    runner = Runner(sampler, WatchdogConfig(), actions, counts)
    registry: CollectorRegistry = alone(lambda: runner.status(now[0], now[0] + 1e9), counts)
    runner.ready(PLANS, Ours(frozenset({gpus._pid}), "simulated"))
    blind = []
    for second in range(1, 31):
        now[0] = float(second)
        if second == 5:
            source.arm(now[0])
        sampler.sample()
        runner.observe(now[0], Work(0, second, 0, boundary=True), [Holdings(1)] * 2)
        told = registry.get_sample_value
        blind.append(told("ullage_watchdog_state", {"device": "1", "state": "blind"}))
        assert told("ullage_watchdog_state", {"device": "0", "state": "ok"}) == 1
        lost = told("ullage_vram_free_bytes", {"device": "1"}) is None
        assert lost == bool(blind[-1]), "no figure is shown that is not fresh"
    assert blind == [0.0] * 4 + [1.0] * 10 + [0.0] * 16
    assert told("ullage_watchdog_last_sample_timestamp_seconds", {"device": "1"}) == 1e9 + 30
    assert told("ullage_watchdog_samples_total", {"device": "1", "result": "nvml_error"}) == 10
    assert begun == []


def test_elastic_memory_regrows_only_where_every_device_has_room(bench: Bench) -> None:
    """It comes and goes on all devices at once: what was given up for one device is not taken again for another."""
    given_up = Holdings(1, released=512 * MIB, elastic=Elastic(plan=GIB, held=512 * MIB))
    bench.holdings = [given_up, given_up]
    bench.source.free[0] += 512 * MIB
    for _ in range(8):
        bench.tick(400 * MIB)
    assert bench.begun == []
    for _ in range(4):
        bench.tick(480 * MIB + 512 * MIB)
    assert {action.device for action in bench.begun if isinstance(action, Regrow)} == {0, 1}
