"""How every CPU kernel is compiled, cached and spread over threads.

Kernels are compiled at their first call and kept in numba's cache, in a folder named after the sources of all of them:
numba itself looks only at the one file that holds a kernel, and would miss a change in a function it calls. The parent
process says where the cache lies (NUMBA_CACHE_DIR); without that it is the user's cache folder.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config as numba_config
from numba.core.caching import NullCache

from engine.config import BLOCK_TOKENS
from engine.errors import ConfigError

log = logging.getLogger(__name__)

Function = Callable[..., Any]

SPIN_ROUNDS = "2000"
"""How long (about 0.1 ms) a thread that has run out of work spins before it sleeps. Between two ops of a step it finds
work in that time (a wake-up costs 15 to 35 µs, and there are some 150 a step); between two steps the core is free for
others, and a program that wants both cores gets them."""

_kernels: list[Any] = []


def _source_stamp() -> str:
    """Names the code that kernels are compiled from: the files here that define any, and one constant from outside."""
    digest = hashlib.sha256(str(BLOCK_TOKENS).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        text = source.read_bytes()
        if re.search(rb"@(kernel|inner|word)\b", text):
            digest.update(text)
    return digest.hexdigest()[:16]


# Only there: numba would fall back on folders beside the sources, where a change in a called function goes unnoticed.
numba_config.CACHE_LOCATOR_CLASSES = "UserProvidedCacheLocator"
numba_config.CACHE_DIR = str(Path(numba_config.CACHE_DIR or Path.home() / ".cache/ullage/numba") / _source_stamp())


def kernel(*, parallel: bool = False) -> Callable[[Function], Function]:
    """Compile a function that Python calls: no fast-math (sums keep their order), no GIL, cached where possible."""

    def decorate(function: Function) -> Function:
        options = {"nogil": True, "error_model": "numpy", "parallel": parallel}
        try:
            compiled = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # numba's word for: no folder can be written
            compiled = numba.njit(**options)(function)
        _kernels.append(compiled)
        return compiled  # type: ignore[no-any-return]

    return decorate


def inner(function: Function) -> Function:
    """Compile a function that only kernels call; it becomes part of each of them."""
    return numba.njit(nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]


def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None when no folder can be written and every start compiles anew."""
    paths = {kernel.stats.cache_path for kernel in _kernels}
    return None if None in paths else Path(numba_config.CACHE_DIR)


def first_run(run: Callable[[], None]) -> None:
    """Call `run`, which compiles kernels or loads them from the cache.

    If the cache cannot be written, its disk being full perhaps, they are compiled without and that is said.
    """
    if cache_folder() is not None:
        try:
            return run()
        except OSError as error:
            log.warning("%s: cannot keep compiled kernels: %s", numba_config.CACHE_DIR, error.strerror)
            for compiled in _kernels:
                compiled._cache = NullCache()
    log.warning("kernels are compiled anew at every start, because no folder can be written to keep them")
    return run()


def variants() -> dict[str, int]:
    """How many signatures of each kernel, by its full name, are compiled in this process."""
    return {f"{kernel.py_func.__module__}.{kernel.__name__}": len(kernel.signatures) for kernel in _kernels}


def usable_cores() -> int:
    """Physical cores this process may use: by its affinity, and by its cgroup's quota where there is one."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    quota = Path("/sys/fs/cgroup/cpu.max")
    limit, period = quota.read_text().split() if quota.exists() else ("max", "1")
    return len(cores) if limit == "max" else max(1, min(len(cores), -(-int(limit) // int(period))))


def start_threads(wanted: int | None = None) -> int:
    """Settle how many threads share a kernel, before the first one runs; returns that number.

    OpenMP's threads are preferred over numba's own, which sleep at once and so pay a wake-up for every op.
    Raises ConfigError when more are `wanted` than the CPUs that this process may use.
    """
    most = int(numba_config.NUMBA_NUM_THREADS)
    if wanted is not None and not 1 <= wanted <= most:
        raise ConfigError(f"threads: {wanted} wanted, but this process may use 1 to {most}")
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_ROUNDS)  # read when the OpenMP library is loaded
    numba_config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    threads = min(most, usable_cores()) if wanted is None else wanted
    numba.set_num_threads(threads)
    return threads
