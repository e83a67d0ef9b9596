"""The watchdog's reader of the simulated cards agrees with the engine's writer, process by process, dead ones too."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.memory.simulated_gpus import SimulatedCard, SimulatedGpus
from watchdog import simulated
from watchdog.simulated import Loss, SimulatedSource
from watchdog.snapshot import GIB, MIB
from watchdog.source import SourceError

ROOT = Path(__file__).resolve().parents[2]
CARDS = [SimulatedCard(16 * GIB, 600 * MIB), SimulatedCard(8 * GIB, 0)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "simulated-gpus"


@contextmanager
def holder(path: Path, device: int, owner: str, size: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process with a row."""
    program = (
        "import sys; from pathlib import Path; from engine.memory.simulated_gpus import SimulatedGpus\n"
        f"SimulatedGpus.open(Path({str(path)!r})).resize({device}, {owner!r}, {size})\n"
        "print(flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def agree(source: SimulatedSource, gpus: SimulatedGpus) -> None:
    for device, card in enumerate(gpus.cards):
        reading = source.read(device, 0.0)
        assert (reading.total, reading.reserved) == (card.total, card.reserved)
        assert reading.free == gpus.free(device)
        held = sorted((row.pid, row.owner, row.size) for row in gpus.rows() if row.device == device)
        assert sorted((row.pid, row.owner, row.held) for row in source.rows(device)) == held


def test_reader_and_writer_agree(path: Path) -> None:
    gpus = SimulatedGpus.create(path, CARDS)
    source = SimulatedSource(path)
    assert [card.name for card in source.cards] == ["simulated 16384 MiB", "simulated 8192 MiB"]
    agree(source, gpus)
    gpus.resize(0, "weights", 3 * GIB)
    gpus.resize(0, "kv_cache", GIB + 7)
    gpus.resize(1, "a_name_of_24_characters_", 5)
    with holder(path, 0, "foreign", 900 * MIB) as other:
        agree(source, gpus)
        assert source.holders(0) == {os.getpid(): 4 * GIB + 7, other.pid: 900 * MIB}
        assert source.holders(1) == {os.getpid(): 5}
        gpus.take(1, "foreign", 100 * GIB)
        agree(source, gpus)
        assert source.read(1, 0.0).free == 0
        os.kill(other.pid, signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie: dead, and not reaped
        agree(source, gpus)
        assert source.holders(0) == {os.getpid(): 4 * GIB + 7}
    agree(source, gpus)
    source.close()


def test_rows_of_the_dead_vanish_after_the_delay_of_the_header(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = SimulatedGpus.create(path, CARDS, row_delay_s=1.0)
    now = [10**9]
    monkeypatch.setattr(simulated.time, "monotonic_ns", lambda: now[0])
    source, second = SimulatedSource(path), SimulatedSource(path)
    full = gpus.free(0)
    with holder(path, 0, "weights", GIB) as engine:
        engine.kill()
        engine.wait()
        assert source.read(0, 0.0).free == full - GIB, "found dead only now"
        now[0] += 999_999_999
        assert second.read(0, 0.0).free == full - GIB
        now[0] += 1
        assert second.read(0, 0.0).free == full, "the first finder's time counts for all"
        assert source.read(0, 0.0).free == full


def test_a_reader_that_may_not_write_goes_by_its_first_sight(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = SimulatedGpus.create(path, CARDS, row_delay_s=1.0)
    full = gpus.free(0)
    opened = os.open
    monkeypatch.setattr(
        simulated.os,
        "open",
        lambda file, flags: opened(file, flags) if not flags & os.O_RDWR else _refuse(),
    )
    source = SimulatedSource(path)
    now = [10**9]
    monkeypatch.setattr(simulated.time, "monotonic_ns", lambda: now[0])
    with holder(path, 0, "weights", GIB) as engine:
        engine.kill()
        engine.wait()
        assert source.read(0, 0.0).free == full - GIB
        now[0] += 10**9
        assert source.read(0, 0.0).free == full
    assert int(gpus._rows["died"].max()) == 0


def _refuse() -> int:
    raise PermissionError(13, "Permission denied")


def test_a_number_given_to_a_new_process_is_not_taken_for_the_old_one(path: Path) -> None:
    gpus = SimulatedGpus.create(path, CARDS)
    gpus.resize(0, "weights", GIB)
    gpus._rows["started"][0] += 1
    source = SimulatedSource(path)
    assert source.rows(0) == []


@pytest.mark.parametrize("lost", [None, 1])
def test_the_fault_makes_devices_unreadable_for_its_time(path: Path, lost: int | None) -> None:
    SimulatedGpus.create(path, CARDS)
    source = SimulatedSource(path, Loss(seconds=10.0, device=lost))
    source.read(1, 0.0)
    source.arm(100.0)
    source.arm(105.0)
    if lost is None:
        with pytest.raises(SourceError, match="lost"):
            source.read(0, 101.0)
    else:
        source.read(0, 101.0)
    for at in (100.0, 109.9):
        with pytest.raises(SourceError, match="lost"):
            source.read(1, at)
    source.read(1, 110.0)


def test_what_is_no_such_file_is_refused(path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        SimulatedSource(path)
    for content in (b"short", bytes(simulated.SIZE)):
        path.write_bytes(content)
        with pytest.raises(SourceError, match="holds no simulated cards"):
            SimulatedSource(path)


def test_a_card_that_was_taken_away_is_no_reading(path: Path) -> None:
    SimulatedGpus.create(path, CARDS)
    source = SimulatedSource(path)
    SimulatedGpus.create(path, CARDS[:1])
    with pytest.raises(SourceError, match="card 1 is gone"):
        source.read(1, 0.0)
    assert source.read(0, 0.0).total == 16 * GIB
