import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.channel import Channel
from engine.lifeline import Heart, volunteer_for_the_oom_killer
from engine.messages import Heartbeat


@dataclass
class Watched:
    steps: int
    turn_began: float | None


@pytest.fixture
def heart() -> Iterator[Heart]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Heart(Channel(theirs, 1))


def test_the_beat_of_a_load(heart: Heart) -> None:
    beat = heart.beat(heart._began + 5)
    assert beat == Heartbeat(0, True, 5.0)


def test_the_beat_of_a_loop(heart: Heart) -> None:
    heart.watch(Watched(7, None))
    assert heart.beat(100.0) == Heartbeat(7, False, 0.0)
    heart.watch(Watched(8, 97.5))
    assert heart.beat(100.0) == Heartbeat(8, True, 2.5)


@pytest.mark.parametrize(("before", "after"), [("0", "500"), ("-300", "500"), ("900", "900")])
def test_the_oom_score_is_only_ever_raised(before: str, after: str, tmp_path: Path) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text(before + "\n")
    volunteer_for_the_oom_killer(tmp_path)
    assert score.read_text() == after


def test_a_system_that_forbids_it_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volunteer_for_the_oom_killer(tmp_path / os.devnull.strip("/"))
    assert "cannot be raised" in capsys.readouterr().err


def test_the_heart_notices_the_end_of_the_service_while_a_step_runs() -> None:
    program = (
        "import socket, time\n"
        "from engine.channel import Channel\n"
        "from engine.lifeline import Heart\n"
        "ours, theirs = socket.socketpair()\n"
        "Heart(Channel(theirs, 1)).start()\n"
        "ours.close()\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (1, "the service is gone: Broken pipe\n")
