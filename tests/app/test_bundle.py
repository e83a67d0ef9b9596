"""`ullage bundle`: what is in it, what is never in it, and that it is made where nothing runs any more."""

import io
import json
import re
import tarfile
from pathlib import Path

import httpx
import pytest

from app.bundle import bundle, versions
from app.settings import Settings
from engine.errors import ConfigError
from tests.app.cards import on_cards
from tests.app.running import ADMIN_KEY
from tests.app.test_vram_command import known_to

SECRET = "a question that is nobody's business"


def unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        [folder] = {member.name.split("/")[0] for member in members}
        assert re.fullmatch(r"ullage-bundle-\d{8}-\d{6}", folder)
        return {member.name.split("/", 1)[1]: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def test_of_a_running_service_and_of_one_that_is_gone(tmp_path: Path) -> None:
    target = tmp_path / "first.tar.gz"
    (tmp_path / "state").mkdir()
    with on_cards(tmp_path / "state", text=SECRET) as (running, _):
        settings = known_to(tmp_path / "state", running)
        body = {"model": "bytes", "messages": [{"role": "user", "content": SECRET}]}
        assert SECRET in httpx.post(running.v1 + "/chat/completions", json=body).text
        running.wait_until(lambda inside: len(inside.table.rows) == 1)
        said = io.StringIO()
        assert bundle(settings, str(target), said) == 0
        assert said.getvalue().startswith(f"{target}: versions.json, plan.json, ")
    assert target.stat().st_mode & 0o777 == 0o600
    parts = unpacked(target)
    assert set(parts) == {
        "versions.json", "plan.json", "events.jsonl", "requests.jsonl", "vram.json", "history.json", "metrics.txt",
        "doctor.txt", "missing.txt",
    }  # fmt: skip
    assert [device["name"] for device in json.loads(parts["plan.json"])["devices"]] == ["card", "card"]
    assert sum(json.loads(parts["vram.json"])["devices"][0]["ledger"].values()) > 0
    assert json.loads(parts["requests.jsonl"])["generated_tokens"] == len(SECRET) + 1
    assert b'"kind":"ready"' in parts["events.jsonl"]
    assert b"ullage_vram_free_bytes" in parts["metrics.txt"]
    assert set(re.findall(rb"^(\S+):", parts["missing.txt"], re.MULTILINE)) == {
        b"boot.json", b"events.1.jsonl", b"requests.1.jsonl"
    }  # fmt: skip
    everything = b"".join(parts.values())
    for secret in (SECRET, ADMIN_KEY):
        assert secret.encode() not in everything
    later = tmp_path / "later.tar.gz"
    bundle(settings, str(later), io.StringIO())
    parts = unpacked(later)
    assert "events.jsonl" in parts
    assert "vram.json" not in parts
    assert b"vram.json: no service answers at" in parts["missing.txt"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.write_text("mine")
    with pytest.raises(ConfigError, match=f"--out {target}: File exists"):
        bundle(Settings(state_dir=str(tmp_path), cache_dir=str(tmp_path)), str(target), io.StringIO())
    assert target.read_text() == "mine"


def test_versions_name_what_takes_part() -> None:
    found = versions()
    assert {"python", "system", "ullage", "numpy", "fastapi", "uvicorn", "prometheus-client"} <= set(found)
    assert "pytest" not in found
