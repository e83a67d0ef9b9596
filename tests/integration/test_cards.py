"""A service on simulated cards, seen from outside: its sudden end, neighbours on its cards, a card that goes blind."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from app.card_lock import shared_folder
from benchmarks.served import Answer, Served, serving
from tests.app.process import TINY, environment
from tests.integration.streams import in_background, settled, until

MIB = 1 << 20
CARDS = (
    "--model",
    str(TINY),
    "--simulate-gpus",
    "2x3GiB",
    "--max-batch",
    "40",
    "--max-context",
    "1024",
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def served(state: Path) -> Iterator[Served]:
    with serving(state, *CARDS) as running:
        watching(running)
        yield running


def watching(served: Served) -> list[dict[str, Any]]:
    """The devices, once the watchdog knows their floors."""
    known = until(served, lambda shown: all(each["baseline_free"] is not None for each in shown["devices"]))
    return list(known["devices"])


@contextmanager
def from_outside(cards: Path) -> Iterator[Iterator[list[dict[str, Any]]]]:
    """The devices as another process sees them, ten times a second."""
    command = [sys.executable, "-P", "-m", "app", "watch", "--simulated", str(cards), "--json", "--every", "0.1"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield (json.loads(line)["devices"] for line in process.stdout)
        process.terminate()


def of(served: Served, kind: str, device: int | None = None) -> list[dict[str, Any]]:
    return [event for event in served.events() if event["kind"] == kind and event["device"] in (None, device)]


def test_a_service_that_is_killed_leaves_no_engine_and_no_memory_behind(served: Served) -> None:
    [engine] = served.engines()
    assert all(device["used"] > 1000 * MIB for device in served.vram()["devices"])

    cut = Answer()

    def ask() -> None:
        with suppress(OSError, HTTPException):
            served.chat("Go on", cut, stream=True, max_tokens=900)

    with in_background(ask), from_outside(served.cards) as lines:
        next(lines)
        while not cut.arrivals:
            time.sleep(0.001)
        served.process.kill()
        died = time.monotonic()
        served.process.wait(10)
        while Path(f"/proc/{engine}").exists() and "\nState:\tZ" not in Path(f"/proc/{engine}/status").read_text():
            assert time.monotonic() < died + 2, "the engine outlives its service"
            time.sleep(0.02)
        while any(device["used"] for device in next(lines)):
            assert time.monotonic() < died + 2, "the cards do not have their memory back"


def test_who_looks_but_once_after_a_death_sees_the_memory_back(served: Served) -> None:
    served.process.kill()
    served.process.wait(10)
    time.sleep(2)
    command = [sys.executable, "-P", "-m", "app", "watch", "--simulated", str(served.cards), "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert [device["used"] for device in told["devices"]] == [0, 0]


def test_a_neighbour_is_made_room_for_and_its_room_is_taken_again(state: Path) -> None:
    """With every setting as it comes: a cool-down between pieces would make the neighbour wait for minutes."""
    with serving(state, *CARDS, "--faults", "foreign=900MiB@1") as served:
        was = watching(served)[1]
        assert was["baseline_free"] < 700 * MIB, "it must find less than it wants"
        generation = settled(served)["reload"]["generation"]
        for number in range(6):
            assert served.chat(f"hello {number}", max_tokens=4).whole
        [neighbour] = neighbours(served)
        until(served, lambda shown: shown["devices"][1]["other"] == 900 * MIB, 20)  # the rest as it gets free
        shrunk = until(served, lambda shown: shown["devices"][1]["state"] in ("ok", "watch"), 20)["devices"][1]
        assert shrunk["trend"]["class"] == "foreign"
        assert shrunk["idle_free"] > shrunk["floors"]["trim"]
        held = shrunk["ledger"]["kv_cache"]
        assert was["ledger"]["kv_cache"] - held >= 900 * MIB - was["baseline_free"]
        assert served.chat("hello again", max_tokens=4).whole
        decisions = of(served, "decision", 1)
        assert {event["rung"] for event in decisions} == {"elastic"}
        assert "another process holds" in decisions[0]["reason"]
        os.kill(neighbour, signal.SIGKILL)
        least = was["ledger"]["kv_cache"] - 52 * MIB  # a tenth of the reserve is worth no act
        until(served, lambda shown: shown["devices"][1]["ledger"]["kv_cache"] >= least, 30)
        assert of(served, "regrow", 1)
        after = until(served, lambda shown: shown["devices"][1]["state"] == "ok")
        assert after["reload"]["generation"] == generation
        assert of(served, "reload") == []


def neighbours(served: Served) -> list[int]:
    """Processes that the fault `foreign` has started on these cards."""
    mine = str(served.cards).encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if b"engine.foreign" in arguments and mine in arguments:
                found.append(int(entry.name))
    return found


def test_a_card_that_cannot_be_read_is_blind_and_nothing_is_done_about_it(state: Path) -> None:
    with serving(state, *CARDS, "--faults", "nvml=lost:10s@1") as served:
        free = watching(served)[1]["baseline_free"]
        blind = until(served, lambda shown: shown["devices"][1]["state"] == "blind", 30)["devices"]
        assert blind[0]["state"] == "ok"
        assert (blind[1]["free"], blind[1]["idle_free"]) == (None, None)
        assert served.chat("Hello", max_tokens=4).whole
        assert served.chat("Hello", stream=True, max_tokens=4).whole
        metrics = served.metrics()
        assert 'ullage_vram_free_bytes{device="0"}' in metrics
        assert 'ullage_vram_free_bytes{device="1"}' not in metrics
        assert 'ullage_watchdog_state{device="1",state="blind"} 1.0' in metrics
        again = until(served, lambda shown: shown["devices"][1]["state"] == "ok", 30)
        assert again["devices"][1]["free"] <= free
        assert [event for event in served.events() if event["kind"] in ("decision", "trim", "reload")] == []


def test_simulated_cards_of_two_services_do_not_wait_for_each_other(served: Served) -> None:
    """Both call their first card SIMULATED-0; only real cards are shared."""
    with (shared_folder() / "ullage-SIMULATED-0.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        served.reload()
        assert settled(served, 2)["reload"]["last"]["result"] == "ok"
