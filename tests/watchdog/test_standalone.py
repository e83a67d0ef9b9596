"""`ullage watch`: the watchdog for any engine, without app and without engine."""

import argparse
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.memory.simulated_gpus import SimulatedCard, SimulatedGpus
from tests.watchdog.scripted import Scripted
from watchdog.command import add_arguments, run
from watchdog.metrics import alone
from watchdog.sampler import Sampler
from watchdog.snapshot import GIB, MIB
from watchdog.source import SourceError
from watchdog.standalone import HEADING, Options, Watching, concerns, line
from watchdog.trend import TrendClass

ROOT = Path(__file__).resolve().parents[2]


class Bench:
    """A watch over a scripted source, looked at every 10 s."""

    def __init__(self, **options: object) -> None:
        self.source = Scripted()
        self.sampler = Sampler(self.source, self.source.clock)
        self.watching = Watching(self.source, self.sampler, Options(**options))  # type: ignore[arg-type]

    def after(self, seconds: float, free: int | None = None, own: int | None = None):
        """Status of device 1 once `seconds` have passed."""
        if free is not None:
            self.source.free[1] = free
        if own is not None:
            self.source.held = {os.getpid(): own}
        for _ in range(max(1, round(seconds / 10))):
            self.source.now += 10
            self.sampler.sample()
            self.watching.look()
        return self.watching.status.devices[1]


def test_a_slow_loss_is_growth_with_a_forecast() -> None:
    bench = Bench()
    bench.after(60, free=500 * MIB)
    for request in range(30):
        status = bench.after(90, free=(500 - 6 * request) * MIB)
    assert status.kind is TrendClass.GROWTH
    assert status.slopes is not None
    assert status.slopes.per_second * 3600 == pytest.approx(240 * MIB, rel=0.2)
    assert status.forecast is not None
    assert status.forecast.seconds == pytest.approx((326 * MIB - status.floors.reload) / (6 * MIB) * 90, rel=0.3)
    assert list(concerns(status)) == ["growth"]
    assert "an hour" in concerns(status)["growth"]
    other = bench.watching.status.devices[0]
    assert (other.kind, concerns(other)) == (TrendClass.FLAT, {})
    shown = bench.watching.json()["devices"][1]["trend"]
    assert shown["forecast_seconds"] > 0
    assert (shown["bytes_per_request"], shown["forecast_requests"]) == (None, None), "no requests are seen"


def test_with_a_process_a_neighbour_is_told_from_a_loss() -> None:
    bench = Bench(pid=os.getpid())
    bench.after(60, free=2 * GIB, own=10 * GIB)
    status = bench.after(300, free=GIB, own=10 * GIB)
    assert status.kind is TrendClass.FOREIGN
    assert list(concerns(status)) == ["foreign"]
    assert status.reading.own == 10 * GIB


def test_children_that_come_later_count_with_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watchdog.standalone.family", lambda pid: frozenset({pid}))
    bench = Bench(pid=7)
    bench.source.held = {7: GIB, 8: 3 * GIB}
    assert bench.after(20).reading.own == GIB
    monkeypatch.setattr("watchdog.standalone.family", lambda pid: frozenset({pid, 8}))
    assert bench.after(20).reading.own == 4 * GIB


def test_low_memory_and_blindness_are_told_once() -> None:
    bench = Bench()
    bench.after(60, free=480 * MIB)
    assert concerns(bench.after(60, free=100 * MIB))["low"].endswith("under the reload floor")
    bench.source.broken[1] = "NVML: gone"
    assert concerns(bench.after(60)) == {"blind": "NVML: gone"}


def test_a_line_has_the_columns_of_its_heading() -> None:
    bench = Bench()
    status = bench.after(60, free=480 * MIB)
    columns = line(status).split()
    assert columns == ["1", "480", "480", "480", "-", "-", "flat", "-", "-", "ok"]
    assert HEADING.split()[1 : len(columns) + 1] == (
        ["device", "free", "idle", "lowest", "own", "other", "class", "MiB/h", "minutes", "state"]
    )
    bench.source.broken[1] = "gone"
    assert line(bench.after(60)).split()[1:4] == ["-", "-", "-"]
    assert line(status).index("flat") + len("09:00:00 ") == HEADING.index("class")


def test_metrics_say_nothing_per_request() -> None:
    bench = Bench()
    bench.after(60)
    registry = alone(lambda: bench.watching.status, bench.watching.counts)
    assert registry.get_sample_value("ullage_vram_free_bytes", {"device": "0"}) == 4 * GIB
    assert registry.get_sample_value("ullage_vram_exhaustion_forecast_seconds", {"device": "0"}) == float("inf")
    assert registry.get_sample_value("ullage_vram_exhaustion_forecast_requests", {"device": "0"}) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every_s": 0.0}, "--every 0.0"),
        ({"reserve_mib": 0}, "--reserve-mib 0"),
        ({"json": True, "metrics": "9000"}, "add --every"),
    ],
)
def test_nonsense_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Options(**options)  # type: ignore[arg-type]


def test_a_process_that_is_not_there_is_refused() -> None:
    with pytest.raises(SourceError, match="no such process"):
        Bench(pid=2**22 + 1)


# The command, in a folder that has nothing but watchdog/.


@pytest.fixture
def alone_at(tmp_path: Path) -> Path:
    (tmp_path / "watchdog").symlink_to(ROOT / "watchdog")
    return tmp_path


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-P", "-m", "watchdog", *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def finished(folder: Path, *arguments: str) -> tuple[int, str, str]:
    with started(folder, *arguments) as process:
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


def test_one_look_as_json(alone_at: Path) -> None:
    gpus = SimulatedGpus.create(alone_at / "gpus", [SimulatedCard(16 * GIB, 600 * MIB)] * 2)
    gpus.resize(1, "weights", 3 * GIB)
    gpus.resize(1, "kv_cache", GIB)
    code, out, err = finished(alone_at, "--simulated", str(alone_at / "gpus"), "--json", "--pid", str(os.getpid()))
    assert (code, err, out.count("\n")) == (0, "", 1)
    told = json.loads(out)
    device = told["devices"][1]
    assert (device["total"], device["used"], device["own"], device["other"]) == (16 * GIB, 4 * GIB, 4 * GIB, 0)
    assert device["free"] == gpus.free(1)
    assert device["baseline_free"] == device["idle_free"] == device["free"]
    assert (device["state"], device["source"], device["trend"]["class"]) == ("ok", "simulated", "flat")
    owners = {"weights": 3 * GIB, "kv_cache": GIB}
    assert device["processes"] == [{"pid": os.getpid(), "bytes": 4 * GIB, "owners": owners}]
    assert (told["pid"], told["alerts"]) == (os.getpid(), [])


def test_lines_until_ctrl_c_with_metrics(alone_at: Path) -> None:
    SimulatedGpus.create(alone_at / "gpus", [SimulatedCard(16 * GIB, 0)])
    with started(
        alone_at, "--simulated", str(alone_at / "gpus"), "--every", "0.1", "--metrics", "127.0.0.1:0"
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("metrics: ").strip()
        assert process.stdout.readline().startswith("time")
        assert " 16,384 " in process.stdout.readline()
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert 'ullage_vram_total_bytes{device="0"} 1.7179869184e+10' in answer.read().decode()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        assert process.returncode == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_stream_of_json_sees_a_killed_engines_memory_come_back(alone_at: Path) -> None:
    path = alone_at / "gpus"
    gpus = SimulatedGpus.create(path, [SimulatedCard(16 * GIB, 0)], row_delay_s=0.2)
    program = (
        "import sys; from pathlib import Path; from engine.memory.simulated_gpus import SimulatedGpus\n"
        f"SimulatedGpus.open(Path({str(path)!r})).resize(0, 'weights', 9 << 30); print(flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    engine = subprocess.Popen(
        [sys.executable, "-P", "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with engine, started(alone_at, "--simulated", str(path), "--json", "--every", "0.1") as process:
        assert engine.stdout is not None
        engine.stdout.readline()
        engine.kill()
        assert process.stdout is not None
        for shown in process.stdout:
            device = json.loads(shown)["devices"][0]
            if device["free"] == 16 * GIB:
                break
    assert device["processes"] == []
    assert gpus.free(0) == 16 * GIB


def test_a_reader_that_leaves_is_no_error(alone_at: Path) -> None:
    SimulatedGpus.create(alone_at / "gpus", [SimulatedCard(16 * GIB, 0)])
    with started(alone_at, "--simulated", str(alone_at / "gpus"), "--every", "0.05") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(timeout=30)
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--simulated", "nowhere"], "nowhere: No such file"),
        (["--every", "-1"], "--every -1.0: from 0.05"),
        (["--metrics", "here"], "--metrics here: expected PORT"),
    ],
)
def test_bad_input_is_one_line_and_2(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(arguments)) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert text in told.err
