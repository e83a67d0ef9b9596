"""What a service remembers of its starts, as its users start it."""

import json
import signal
from pathlib import Path

import httpx

from app.boot import BOOT_FILE, STARTS, Boot, fingerprint
from app.settings import load_settings
from engine.build import build_id
from tests.app.process import TINY, serving, ullage


def attempts(state: Path) -> int:
    return len(json.loads((state / BOOT_FILE).read_bytes())["attempts"])


def fail(state: Path, times: int) -> None:
    """Starts with these settings that came to nothing."""
    asked = load_settings({"model": str(TINY)}).engine_config(str(TINY))
    for _ in range(times):
        boot = Boot(state, fingerprint(asked, build_id()))
        boot.begin()
        boot.failed("the engine (pid 7) was killed by signal 11 (Segmentation fault)")


def test_a_crash_loop_ends_with_its_table(tmp_path: Path) -> None:
    fail(tmp_path, 3 * STARTS)
    done = ullage("serve", "--model", str(TINY), "--port", "0", "--ops-port", "0", "--state-dir", str(tmp_path))
    assert done.returncode == 3
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("ullage: crash loop: ")
    assert sum("killed by signal 11" in line for line in lines) == 3 * STARTS
    assert str(tmp_path / BOOT_FILE) in lines[-1]
    other = ullage(
        *("serve", "--check", "--model", str(TINY), "--max-context", "512"),
        *("--port", "0", "--ops-port", "0", "--state-dir", str(tmp_path)),
    )
    assert other.returncode == 0, "with other settings it is worth another try"


def test_a_start_counts_until_it_has_served_somebody(tmp_path: Path) -> None:
    fail(tmp_path, STARTS)
    with serving("--model", str(TINY), state=tmp_path) as served:
        assert attempts(tmp_path) == STARTS + 1
        served.process.kill()
        served.process.wait()
    assert attempts(tmp_path) == STARTS + 1, "a kill -9 says nothing more"
    with serving("--model", str(TINY), state=tmp_path) as served:
        assert attempts(tmp_path) == STARTS + 2
        assert served.end(signal.SIGINT) == 0
    assert attempts(tmp_path) == STARTS + 1
    with serving("--model", str(TINY), state=tmp_path) as served:
        httpx.post(served.v1 + "/completions", json={"model": "model", "prompt": "x", "max_tokens": 1})
        assert attempts(tmp_path) == 0
    assert json.loads((tmp_path / BOOT_FILE).read_bytes())["dropped"] == ["shadow"]
