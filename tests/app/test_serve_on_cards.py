"""`ullage serve` on simulated cards, as a user runs it, and the commands that look at it."""

import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

from openai import OpenAI

from tests.app.process import TINY, Served, serving, ullage

MIB = 1 << 20


def admin(served: Served, state: Path, path: str, body: Any = None) -> Any:
    key = (state / "admin.key").read_text().strip()
    request = urllib.request.Request(
        served.metrics.removesuffix("/metrics") + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def known_at_rest(served: Served, state: Path) -> None:
    """Wait until every device's idle free memory is known: a request before that has no change to tell."""
    deadline = time.monotonic() + 60
    while any(device["idle_free"] is None for device in admin(served, state, "/admin/vram")["devices"]):
        assert time.monotonic() < deadline, "idle free memory stays unknown"
        time.sleep(0.05)


def test_a_leak_of_the_real_engine_is_in_the_table_and_a_trim_measured(tmp_path: Path) -> None:
    cards = ["--simulate-gpus", "2x2GiB", "--faults", "leak=4MiB/request@1", "--watchdog", "dry-run"]
    with serving("--model", str(TINY), *cards, state=tmp_path) as served:
        client = OpenAI(base_url=served.v1, api_key="none")
        known_at_rest(served, tmp_path)
        for number in range(3):
            client.completions.create(model=served.model, prompt=[5, 6, 7 + number], max_tokens=2)
            time.sleep(1.2)  # longer than a sample: requests closer than that share a reading
        trimmed = admin(served, tmp_path, "/admin/trim", {"rung": "cublas_workspace", "device": 1})["results"]
        assert [(each["result"], each["returned_bytes"]) for each in trimmed] == [("ok", 64 * MIB)]
        rows = admin(served, tmp_path, "/admin/vram/requests")["requests"]
        assert sum(row["devices"][1]["change_by_owner"]["unaccounted"] for row in rows) == 3 * 4 * MIB
        assert [row["devices"][0]["change"] for row in rows[1:]] == [0, 0]
        shown = admin(served, tmp_path, "/admin/vram")
        assert [device["stages"] for device in shown["devices"]] == [[0], [1]]
        for device in shown["devices"]:
            assert sum(device["ledger"].values()) == device["own"]
            assert device["total"] == device["used"] + device["free"] + device["reserved"]
        table = ullage("vram", "--state-dir", str(tmp_path), "--once")
        assert table.returncode == 0, table.stderr
        assert "simulated 2048 MiB" in table.stdout
        seen = json.loads(ullage("watch", "--simulated", str(tmp_path / "simulated-gpus"), "--json").stdout)
        assert [device["free"] for device in seen["devices"]] == [device["free"] for device in shown["devices"]]
        assert served.end(signal.SIGTERM) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["layer_split"]
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["seq"] for event in told] == list(range(1, len(told) + 1))
    assert {"service", "ready", "trim"} <= {event["kind"] for event in told}


def test_settings_of_devices_are_one_notice_on_the_plain_cpu(tmp_path: Path) -> None:
    flags = ["--port", "0", "--ops-port", "0", "--state-dir", str(tmp_path), "--watchdog", "dry-run"]
    done = ullage("serve", "--check", "--model", str(TINY), *flags, "--vram-reserve-mib", "600")
    assert done.returncode == 0
    assert done.stderr == (
        "ullage: the model runs on the CPU, so there is nothing to watch and nothing reads "
        "--vram-reserve-mib, --watchdog\n"
    )
