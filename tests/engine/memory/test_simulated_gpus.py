"""Cards in a file: shared by processes, refusing what does not fit, and giving back what dead processes held."""

import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError, OutOfMemory
from engine.memory.arena import GRANULE, HostArena
from engine.memory.ledger import Ledger
from engine.memory.owners import Owner
from engine.memory.simulated_gpus import FILE_NAME, SIZE, SimulatedCard, SimulatedGpus, started

GIB, MIB = 1 << 30, 1 << 20
CARDS = [SimulatedCard(16 * GIB, 615 * MIB), SimulatedCard(8 * GIB, 0)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / FILE_NAME


@pytest.fixture
def gpus(path):
    gpus = SimulatedGpus.create(path, CARDS)
    yield gpus
    gpus.close()


@contextmanager
def holder(path, device, owner, size):
    """Another process that holds so much, until it is killed."""
    program = (
        "import sys, pathlib; from engine.memory.simulated_gpus import SimulatedGpus\n"
        "path, device, owner, size = sys.argv[1:]\n"
        "SimulatedGpus.open(pathlib.Path(path)).resize(int(device), owner, int(size))\n"
        "print('holds', flush=True); sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-P", "-c", program, str(path), str(device), owner, str(size)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"holds\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def read_by_the_letter(path):
    """{(device, owner): bytes} and free bytes by device, from the documented format alone; no process has died."""
    data = path.read_bytes()
    magic, devices, _ = struct.unpack_from("<8sQQ", data)
    assert magic == b"ULLSIM01"
    free = [
        total - reserved for total, reserved in (struct.unpack_from("<QQ", data, 64 + 16 * i) for i in range(devices))
    ]
    held = {}
    for place in range(320, len(data), 64):
        pid, _, device, size, died, owner = struct.unpack_from("<QQQQQ24s", data, place)
        if pid:
            assert died == 0
            held[pid, device, owner.rstrip(b"\0").decode()] = size
            free[device] -= size
    return held, free


def test_what_is_held_is_taken_from_what_is_free(gpus):
    assert gpus.cards == CARDS
    assert (gpus.free(0), gpus.free(1)) == (16 * GIB - 615 * MIB, 8 * GIB)
    gpus.resize(0, "weights", 9 * GIB)
    gpus.resize(0, "kv_cache", 2 * GIB)
    gpus.resize(0, "weights", 4 * GIB)
    assert (gpus.free(0), gpus.free(1)) == (10 * GIB - 615 * MIB, 8 * GIB)
    assert {(row.device, row.owner, row.size) for row in gpus.rows()} == {
        (0, "weights", 4 * GIB),
        (0, "kv_cache", 2 * GIB),
    }


def test_more_than_is_free_is_refused_and_changes_nothing(gpus):
    gpus.resize(1, "weights", 5 * GIB)
    with pytest.raises(OutOfMemory) as refused:
        gpus.resize(1, "weights", 9 * GIB)
    error = refused.value
    assert (error.device, error.owner, error.asked, error.free) == (1, "weights", 4 * GIB, 3 * GIB)
    with pytest.raises(OutOfMemory):
        gpus.resize(1, "leak", 3 * GIB + 1)
    assert gpus.free(1) == 3 * GIB
    gpus.resize(1, "leak", 3 * GIB)
    assert gpus.free(1) == 0


def test_taking_stops_at_what_is_free(gpus):
    gpus.resize(1, "weights", 7 * GIB)
    assert gpus.take(1, "foreign", 900 * MIB) == 900 * MIB
    assert gpus.take(1, "foreign", 2 * GIB) == GIB
    assert gpus.free(1) == 0
    gpus.resize(1, "weights", 6 * GIB)
    assert gpus.take(1, "foreign", 1500 * MIB) == 1500 * MIB


def test_the_format_is_what_it_says(gpus, path):
    gpus.resize(0, "cuda_graphs", 3)
    gpus.resize(1, "x" * 24, 2**40 // 1024)
    with holder(path, 1, "leak", 5):
        held, free = read_by_the_letter(path)
        assert path.stat().st_size == SIZE
        assert sorted((device, owner, size) for (_, device, owner), size in held.items()) == [
            (0, "cuda_graphs", 3),
            (1, "leak", 5),
            (1, "x" * 24, 2**30),
        ]
        assert len({pid for pid, _, _ in held}) == 2
        assert free == [gpus.free(0), gpus.free(1)]


def test_what_a_killed_process_held_comes_back(gpus, path):
    with holder(path, 0, "weights", 3 * GIB) as process:
        assert gpus.free(0) == 13 * GIB - 615 * MIB
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while gpus.free(0) < 16 * GIB - 615 * MIB:  # also before anybody has reaped it
            assert time.monotonic() < deadline
        assert gpus.rows() == []


def test_it_comes_back_only_after_the_delay(gpus, path):
    SimulatedGpus.create(path, CARDS, row_delay_s=0.5).close()
    with holder(path, 1, "weights", 8 * GIB) as process:
        process.kill()
        process.wait()
        first_seen = time.monotonic()
        assert gpus.free(1) == 0
        with pytest.raises(OutOfMemory):
            gpus.resize(1, "weights", 1)
        other = SimulatedGpus.open(path)  # goes by the time that the first one noted
        while other.free(1) == 0:
            assert time.monotonic() < first_seen + 10
            time.sleep(0.02)
        assert time.monotonic() >= first_seen + 0.4
        other.close()
    gpus.resize(1, "weights", 8 * GIB)


def test_rows_of_the_living_outlast_a_restart_of_the_service_and_dead_rows_are_used_again(gpus, path):
    with holder(path, 0, "weights", GIB):
        again = SimulatedGpus.create(path, [SimulatedCard(4 * GIB, 0)])
        assert (again.cards, again.free(0)) == ([SimulatedCard(4 * GIB, 0)], 3 * GIB)
        assert gpus.cards == again.cards
    for i in range(512):
        again.resize(0, f"owner {i}", 1)
    assert again.free(0) == 4 * GIB - 512
    with pytest.raises(OutOfMemory):
        again.resize(0, "one too many", 0)
    again.close()


def test_a_process_number_that_was_given_anew_is_another_process(gpus, path):
    gpus.resize(0, "weights", GIB)
    gpus._rows["started"][0] += 1  # as if a process of our number had died before we began
    other = SimulatedGpus.open(path)
    assert other.free(0) == 16 * GIB - 615 * MIB
    other.close()


def test_what_is_not_such_a_file_is_refused(path, tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        SimulatedGpus.open(path)
    path.write_bytes(b"?" * SIZE)
    with pytest.raises(ConfigError, match="holds no simulated cards"):
        SimulatedGpus.open(path)
    with pytest.raises(ConfigError, match="is some other file"):
        SimulatedGpus.create(path, CARDS)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="holds no simulated cards"):
        SimulatedGpus.create(path, CARDS)
    with pytest.raises(ConfigError, match="0 cards"):
        SimulatedGpus.create(tmp_path / "new", [])


def test_the_dead_have_not_started():
    process = subprocess.Popen([sys.executable, "-c", ""])
    while started(process.pid) is not None:  # a zombie from some moment on
        time.sleep(0.01)
    assert process.wait() == 0
    assert started(process.pid) is None
    assert started(2**22 + 1) is None


@settings(max_examples=40, deadline=None)
@given(
    moves=st.lists(st.tuples(st.integers(0, 1), st.sampled_from(list(Owner)[:4]), st.integers(0, 9 * GIB)), max_size=20)
)
def test_a_ledger_over_cards_agrees_with_them(moves, tmp_path_factory):
    gpus = SimulatedGpus.create(tmp_path_factory.mktemp("cards") / FILE_NAME, CARDS)
    ledger = Ledger(range(2), gpus)
    for device, owner, size in moves:
        held, free = ledger.held(device, owner), gpus.free(device)
        if size > held + free:
            with pytest.raises(OutOfMemory):
                ledger.charge(device, owner, size - held)
        elif size >= held:
            ledger.charge(device, owner, size - held)
        else:
            ledger.release(device, owner, held - size)
        for each in range(2):
            assert gpus.free(each) == CARDS[each].total - CARDS[each].reserved - ledger.held(each)
    gpus.close()


def test_an_arena_on_a_card_takes_only_what_the_card_has(gpus):
    arena = HostArena(Ledger([0, 1], gpus), 1, Owner.KV_CACHE, 8 * GIB)
    gpus.resize(1, "leak", 4 * GIB)
    arena.grow([(0, 2048)])
    assert gpus.free(1) == 0
    with pytest.raises(OutOfMemory):
        arena.grow([(2048, 1)])
    assert arena.shrink([(7, 5)]) == gpus.free(1) == 5 * GRANULE
