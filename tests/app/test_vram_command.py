"""`ullage vram` against a running service, and what it says where none runs."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.ops_client import NoAnswer, OpsClient
from app.settings import Settings
from app.state import StateFolder
from app.vram_command import view, vram
from tests.app.cards import MIB, on_cards
from tests.app.running import ADMIN_KEY, Running, service


def known_to(folder: Path, running: Running, host: str = "127.0.0.1") -> Settings:
    """Settings of a command, and the state folder as the service leaves it."""
    folder.mkdir(exist_ok=True)
    state = StateFolder(folder)
    state.tell_ops(running.ops_url, (host,))
    (folder / "admin.key").write_text(ADMIN_KEY + "\n")
    state.close()
    return Settings(state_dir=str(folder))


def shown(settings: Settings, **flags: bool) -> str:
    out = io.StringIO()
    assert vram(settings, out, **flags) == 0
    return out.getvalue()


def rows(text: str) -> dict[str, list[str]]:
    """By the name of the row, the columns of the devices."""
    cells = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.strip()]
    return {name: columns for name, *columns in cells}


def test_a_table_of_the_devices_on_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with on_cards(tmp_path) as (running, machine):
        machine.leak(1, 32 * MIB)
        running.wait_until(lambda inside: inside.pressure.status().devices[1].idle_free == 500 * MIB)
        text = shown(known_to(tmp_path / "state", running))
    found = rows(text)
    assert found["MiB"] == ["0 simulated 4096 MiB", "1 simulated 4096 MiB"]
    assert found["state"] == ["ok", "ok"]
    assert found["idle free"] == ["532", "500"]
    assert found["idle free at ready"] == ["532", "532"]
    assert [found[f"{floor} floor"][1] for floor in ("warn", "trim", "reload")] == ["307", "230", "128"]
    assert found["reload floor in"] == ["-", "-"]
    assert found["unaccounted"] == ["0.0", "32.0"]
    assert found["own in all"] == ["3,564.0", "3,596.0"]
    assert re.search(r"device 1 +ready +engine 1: 532 MiB idle free", text)
    assert "watchdog on" in text


def test_json_is_what_the_service_says(tmp_path: Path) -> None:
    with service() as running:
        settings = known_to(tmp_path, running)
        assert json.loads(shown(settings, as_json=True)).keys() >= {"devices", "reload", "queue"}
        assert "on the CPU" in shown(settings, once=True)


def test_unknown_is_no_zero() -> None:
    unread: dict[str, Any] = {"device": 0, "name": "card", "state": "blind", "tight": None, "ledger": {}}
    unread |= dict.fromkeys(("free", "idle_free", "baseline_free", "own", "other"))
    unread["floors"] = dict.fromkeys(("warn", "trim", "reload"))
    unread["trend"] = {"class": "unknown"} | dict.fromkeys(
        ("bytes_per_request", "bytes_per_second", "forecast_seconds", "forecast_requests")
    )
    said = {"model": "m", "devices": [unread], "watchdog": {"mode": "on", "until": None}}
    said["queue"] = dict.fromkeys(("running", "waiting", "held", "lost"), 0)
    said["reload"] = {"generation": 1, "in_progress": True, "phase": "load", "reason": "operator"}
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(view(said, []))
    text = console.export_text()
    unknown = {name for name, columns in rows(text).items() if columns == ["?"]}
    assert unknown == {
        "free", "idle free", "idle free at ready", "warn floor", "trim floor", "reload floor", "change a request",
        "change an hour", "reload floor in", "own in all", "other in all",
    }  # fmt: skip
    assert rows(text)["state"] == ["blind"]
    assert "reload: load (operator)" in text


def test_a_service_that_answers_to_another_name(tmp_path: Path) -> None:
    with service(settings={"ops_allowed_hosts": ("ullage.internal",)}) as running:
        assert OpsClient.of(known_to(tmp_path, running, "ullage.internal")).json("/admin/vram")["devices"] == []
        with pytest.raises(NoAnswer, match="does not answer to that host name"):
            OpsClient.of(known_to(tmp_path, running)).json("/admin/vram")


def test_a_wrong_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("wrong\n")
    with service() as running:
        folder = known_to(tmp_path, running).state_dir
        with pytest.raises(NoAnswer, match=r"/admin/vram: Missing or wrong API key"):
            vram(Settings(state_dir=folder, admin_key_file=str(keys)), io.StringIO())


def test_where_no_service_runs(tmp_path: Path) -> None:
    with pytest.raises(NoAnswer, match=r"no service has run here; give the --port or the --state-dir"):
        vram(Settings(state_dir=str(tmp_path / "none")), io.StringIO())
    with service() as running:
        settings = known_to(tmp_path, running)
    with pytest.raises(NoAnswer, match=r"no service answers at http://127\.0\.0\.1:"):
        vram(settings, io.StringIO())
    (tmp_path / "ops.json").write_text("{")
    with pytest.raises(NoAnswer, match=r"ops\.json: "):
        vram(settings, io.StringIO())
