"""What `ullage doctor` finds, on machines that are not this one."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from app import doctor
from app.doctor import Finding, findings
from app.settings import Settings
from tests.golden.cases import COMMITTED
from watchdog.snapshot import GIB, MIB, Reading
from watchdog.source import Card, SourceError

Find = Callable[..., dict[str, Finding]]


class FakeNvml:
    """Two cards; `broken` of them cannot be read."""

    broken: tuple[int, ...] = ()
    cards = (Card("GPU-a", "RTX 5060 Ti"), Card("GPU-b", "RTX 5060 Ti"))

    def read(self, device: int, at: float) -> Reading:
        if device in self.broken:
            raise SourceError("NVML: gone")
        return Reading(at, 16 * GIB, 300 * MIB, 16 * GIB - 300 * MIB, 0)

    def driver(self) -> str:
        return "595.91.07"

    def cuda(self) -> tuple[int, int]:
        return 13, 1

    def close(self) -> None:
        pass


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """Findings by thing, on a machine with no card unless the test says otherwise."""
    for name in ("DRIVER", "PCI", "WSL"):
        monkeypatch.setattr(doctor, name, tmp_path / name)

    def none() -> None:
        raise SourceError("NVML: Shared Library Not Found (install the NVIDIA driver)")

    monkeypatch.setattr(doctor, "NvmlSource", none)
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", list)

    def found(**settings: str) -> dict[str, Finding]:
        given = Settings(**{"cache_dir": str(tmp_path / "cache"), **settings})  # type: ignore[arg-type]
        return {finding.thing: finding for finding in findings(given)}

    return found


def with_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *broken: int) -> None:
    monkeypatch.setattr(doctor, "NvmlSource", type("Nvml", (FakeNvml,), {"broken": broken}))
    (tmp_path / "DRIVER").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.91.07  Release\n")


def with_cupy(monkeypatch: pytest.MonkeyPatch, program: str, *names: str) -> None:
    found = [SimpleNamespace(metadata={"Name": name}) for name in (*names, "numpy")]
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda: found)
    monkeypatch.setattr(doctor, "ASK_CUPY", program)


def test_a_machine_without_a_card_serves_from_its_cpu(tmp_path: Path, find: Find) -> None:
    verdicts = {thing: finding.verdict for thing, finding in find().items()}
    assert verdicts == {"driver": "none", "NVML": "none", "CuPy": "none", "caches": "ok", "model": "ok"}
    out = io.StringIO()
    assert doctor.doctor(Settings(cache_dir=str(tmp_path)), out) == 0
    assert len(out.getvalue().splitlines()) == 5
    assert "driver  none  no NVIDIA card is seen; in a container give it one: --gpus all\n" in out.getvalue()


def test_a_card_without_a_driver_is_bad(tmp_path: Path, find: Find) -> None:
    card = tmp_path / "PCI" / "0000:01:00.0"
    card.mkdir(parents=True)
    (card / "class").write_text("0x030200\n")
    (card / "vendor").write_text("0x10de\n")
    found = find()
    assert (found["driver"].verdict, found["NVML"].verdict) == ("bad", "bad")
    assert "modprobe" in found["driver"].mend
    assert doctor.doctor(Settings(cache_dir=str(tmp_path)), io.StringIO()) == 2


def test_cards_are_named_with_their_room(tmp_path: Path, find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, tmp_path)
    found = find()
    assert found["driver"].text == "NVIDIA 595.91.07"
    assert found["NVML"].verdict == "ok"
    assert "CUDA up to 13.1: 0 RTX 5060 Ti, 300 of 16384 MiB free; 1 RTX" in found["NVML"].text
    assert (found["CuPy"].verdict, found["CuPy"].mend) == ("bad", "pip install 'cupy-cuda13x[ctk]'")


def test_a_card_that_cannot_be_read_is_bad(tmp_path: Path, find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, tmp_path, 1)
    nvml = find()["NVML"]
    assert nvml.verdict == "bad"
    assert nvml.text.endswith("1 RTX 5060 Ti: NVML: gone")


@pytest.mark.parametrize(
    ("program", "names", "verdict", "text"),
    [
        ("print('14.2.0 13000 2')", ["cupy-cuda13x"], "ok", "cupy-cuda13x 14.2.0, CUDA 13, 2 devices"),
        ("raise RuntimeError('no device')", ["cupy-cuda13x"], "bad", "cupy-cuda13x: RuntimeError: no device"),
        ("import os; os.abort()", ["cupy-cuda12x"], "bad", "cupy-cuda12x: it died"),
        ("", ["cupy-cuda12x", "cupy-cuda13x"], "bad", "cupy-cuda12x and cupy-cuda13x exclude each other"),
    ],
)
def test_cupy(
    tmp_path: Path,
    find: Find,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    names: list[str],
    verdict: str,
    text: str,
) -> None:
    with_cards(monkeypatch, tmp_path)
    with_cupy(monkeypatch, program, *names)
    cupy = find()["CuPy"]
    assert (cupy.verdict, cupy.text) == (verdict, text)


def test_a_cupy_that_hangs_is_given_up(tmp_path: Path, find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHILD_S", 0.2)
    with_cupy(monkeypatch, "import time; time.sleep(60)", "cupy-cuda13x")
    assert "gave no answer" in find()["CuPy"].text


def test_caches(tmp_path: Path, find: Find) -> None:
    assert "no kernels compiled yet" in find()["caches"].text
    kernels = tmp_path / "cache" / "numba" / "one"
    kernels.mkdir(parents=True)
    (kernels / "a.nbi").touch()
    assert find()["caches"].text.endswith("kernels are compiled")
    (tmp_path / "file").touch()
    bad = find(cache_dir=str(tmp_path / "file" / "under"))["caches"]
    assert (bad.verdict, bad.mend) == ("bad", "give --cache-dir a folder that can")


def test_models(tmp_path: Path, find: Find) -> None:
    assert "fetches the demo model" in find()["model"].text
    model = next(iter(sorted(COMMITTED.rglob("*.gguf"))))
    assert find(model=str(model))["model"].verdict == "ok"
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03")
    broken = find(model=str(tmp_path / "broken.gguf"))["model"]
    assert broken.verdict == "bad"
    assert "broken.gguf" in broken.text
    assert find(model=str(tmp_path / "none.gguf"))["model"].verdict == "bad"
