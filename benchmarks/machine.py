"""What a figure was measured on, in words."""

import os
import platform
from pathlib import Path


def machine() -> str:
    """CPU model, usable cores, memory, Python."""
    cores = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{_cpu_model()}, {cores} cores, {gib:.0f} GiB, Python {platform.python_version()}"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
