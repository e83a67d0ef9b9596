"""Own bytes have a stated source or are unknown; never a guess, never zero."""

import subprocess
import sys

import pytest

from watchdog.attribution import UNKNOWN, Look, Ours, Split, engine_process, family, shaken, split
from watchdog.snapshot import MIB

OURS = Ours(frozenset({7, 8}), "nvml")


@pytest.mark.parametrize(
    ("ours", "holders", "used", "seen", "expected"),
    [
        (OURS, {7: 100, 8: 20, 9: 300}, 500, False, Split(120, 380, "nvml")),
        (OURS, {7: 100, 9: 300}, None, False, Split(100, 300, "nvml")),
        (OURS, {7: 100, 9: None}, None, False, Split(100, None, "nvml")),
        (OURS, {7: 100, 9: None}, 500, False, Split(100, 400, "nvml")),
        (OURS, {7: 600}, 500, False, Split(600, 0, "nvml")),
        (OURS, {7: None}, 500, False, Split()),
        (OURS, {7: None}, 500, True, Split()),
        (OURS, {9: 300}, 500, False, Split()),  # we may be there under another number
        (OURS, {9: 300}, 500, True, Split(0, 500, "nvml")),
        (OURS, None, 500, True, Split()),
        (UNKNOWN, {9: 300}, 500, True, Split()),
        (Ours(frozenset({7}), "simulated"), {}, 0, False, Split(0, 0, "simulated")),
    ],
)
def test_split(
    ours: Ours, holders: dict[int, int | None] | None, used: int | None, seen: bool, expected: Split
) -> None:
    assert split(ours, holders, used, seen=seen) == expected


def looks(*pairs: tuple[int, dict[int, int | None]]) -> list[Look]:
    sized = [({pid: None if n is None else n * MIB for pid, n in holders.items()}, extra) for extra, holders in pairs]
    return [Look(extra * MIB, holders) for holders, extra in sized]


def test_the_process_that_follows_the_handshake_is_the_engine() -> None:
    found = shaken(looks((0, {51: 500, 52: 500}), (64, {51: 500, 52: 564}), (24, {51: 540, 52: 525})))
    assert found == Ours(frozenset({52}), "host_pid")


@pytest.mark.parametrize(
    "told",
    [
        looks((0, {51: 500}), (64, {51: 500})),
        looks((0, {51: 500, 52: 10}), (64, {51: 564, 52: 74})),  # two follow
        looks((0, {51: None}), (64, {51: None})),
        looks((0, {51: 500}), (64, {52: 564})),
        looks((0, {51: 500}), (0, {51: 500})),  # nothing was moved, so nothing was shown
    ],
)
def test_any_doubt_leaves_it_unknown(told: list[Look]) -> None:
    assert shaken(told) == UNKNOWN


def test_in_a_container_our_number_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watchdog.attribution.INITIAL_PID_NAMESPACE", 1)
    assert engine_process(7, "nvml") == UNKNOWN
    assert engine_process(7, "simulated") == Ours(frozenset({7}), "simulated")


def test_family_is_a_process_and_its_descendants() -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-Sc', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True); sys.stdin.read(); child.kill(); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-Sc", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert family(parent.pid) == {parent.pid, child}
        assert parent.stdin is not None
        parent.stdin.close()
    assert family(parent.pid) == frozenset()
