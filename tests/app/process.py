"""`ullage` as a user runs it: a process of its own, on free ports, with the real engine."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.golden.cases import COMMITTED

ROOT = Path(__file__).resolve().parents[2]
TINY = COMMITTED / "models" / "llama-Q4_1-s1" / "model.gguf"
TIMEOUT_S = 100
"""A hang guard; also long enough to compile kernels that no warm cache has."""


def environment() -> dict[str, str]:
    """Without settings of whoever runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ULLAGE_")}


def ullage(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-P", "-m", "app", *arguments]
    settings = {"env": environment(), "timeout": TIMEOUT_S, "capture_output": True, "text": True, **options}
    return subprocess.run(command, check=False, **settings)


class Served:
    """A running `ullage serve`."""

    def __init__(self, process: subprocess.Popen[str], banner: str) -> None:
        self.process = process
        self.banner = banner
        [self.v1] = re.findall(r"^  public +(\S+/v1)", banner, re.MULTILINE)
        [self.metrics] = re.findall(r"^  ops +(\S+/metrics)", banner, re.MULTILINE)
        [self.model] = re.findall(r"^  model +(\S+)", banner, re.MULTILINE)

    def engine_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def end(self, with_signal: signal.Signals) -> int:
        """Exit code after the signal."""
        self.process.send_signal(with_signal)
        return self.process.wait(TIMEOUT_S)


@contextmanager
def serving(*arguments: str, state: Path, **options: Any) -> Iterator[Served]:
    """A service that is ready; ended on leaving if it has not been."""
    command = [sys.executable, "-P", "-m", "app", "serve", "--port", "0", "--ops-port", "0"]
    command += ["--state-dir", str(state), *arguments]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    ) as process:
        try:
            yield Served(process, _banner(process))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(TIMEOUT_S)


def _banner(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line == '    print(chunk.choices[0].delta.content or "", end="", flush=True)\n':
            return "".join(lines)
    raise AssertionError(f"it ended with {process.wait()}:\n" + "".join(lines))
