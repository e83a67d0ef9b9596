"""Where kernels are kept, and what happens when they cannot be; each case is a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.ops.cpu import compiled

PROGRAM = """
import logging, numpy as np
logging.basicConfig(format="%(message)s")
from engine.ops.cpu import compiled
from engine.ops.cpu.philox import philox_words
compiled.first_run(lambda: print(philox_words(np.arange(2), 0, 0, 0).tolist()))
print(compiled.cache_folder())
"""


def run(program: str, cache: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "NUMBA_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )


def test_kept_in_the_folder_that_the_parent_names(tmp_path):
    done = run(PROGRAM, str(tmp_path))
    words, folder = done.stdout.splitlines()
    assert Path(folder).parent == tmp_path
    assert list(Path(folder).rglob("*.nbi"))
    assert done.stderr == ""
    assert run(PROGRAM, str(tmp_path)).stdout.splitlines() == [words, folder]


def test_no_folder_can_be_written():
    done = run(PROGRAM, "/proc/nowhere")
    assert done.stdout.splitlines()[1] == "None"
    assert "kernels are compiled anew at every start" in done.stderr


def test_a_full_disk(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
    done = run(limit + PROGRAM, str(tmp_path))
    assert done.stdout.splitlines()[1] == "None"
    assert "cannot keep compiled kernels: File too large" in done.stderr


def test_threads_are_within_what_the_process_may_use():
    most = len(os.sched_getaffinity(0))
    assert 1 <= compiled.start_threads() <= most
    assert compiled.start_threads(1) == 1
    for wanted in (0, -1, most + 1):
        with pytest.raises(ConfigError, match=f"threads: {wanted} wanted"):
            compiled.start_threads(wanted)


def test_importing_starts_no_thread():
    program = (
        "import threading, os, engine.ops.cpu.load\n"
        "print(len(os.listdir('/proc/self/task')), 'GOMP_SPINCOUNT' in os.environ)\n"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("GOMP_SPINCOUNT", None)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]
