"""The real pynvml adapter against a library compiled here, error codes included."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.watchdog.nvml_cases import CASES

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("gcc") or shutil.which("cc")


@pytest.fixture(scope="module")
def tracebacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case ended with, by name."""
    if COMPILER is None:
        pytest.skip("compiler: gcc or cc is not installed")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_stub.c")
    command = [COMPILER, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source]
    subprocess.run(command, check=True)
    done = child(["-m", "tests.watchdog.nvml_cases"], folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def child(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-P", *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, tracebacks: dict[str, str]) -> None:
    assert not tracebacks[name], tracebacks[name]


def test_without_a_library_the_reason_is_said(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")
    program = "from watchdog.nvml import NvmlSource\nNvmlSource()"
    done = child(["-c", program], tmp_path)
    assert "install the NVIDIA driver" in done.stderr.splitlines()[-1]
