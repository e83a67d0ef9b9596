"""What the watchdog costs: a sample of two devices (under 100 µs), the decision on it, and a scrape.

The simulated cards have seven owners each, as with a served model. NVML is measured where there is a device.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

from engine.memory.simulated_gpus import SimulatedCard, SimulatedGpus
from watchdog.actions import Action
from watchdog.attribution import Ours, engine_process
from watchdog.config import WatchdogConfig
from watchdog.counts import Counts
from watchdog.metrics import alone
from watchdog.nvml import NvmlSource
from watchdog.runner import DevicePlan, Runner
from watchdog.sampler import Sampler
from watchdog.simulated import SimulatedSource
from watchdog.snapshot import GIB, MIB, Holdings, Work
from watchdog.source import SourceError

OWNERS = ("context", "modules", "weights", "kv_cache", "scratch", "cuda_graphs", "leak")
ROUNDS, CALLS = 200, 10
REQUESTS = 200


class Nothing:
    def begin(self, action: Action) -> None:
        """The figures are of deciding, not of acting."""


def run() -> dict[str, Any]:
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "simulated-gpus"
        gpus = SimulatedGpus.create(path, [SimulatedCard(16 * GIB, 600 * MIB)] * 2)
        for device in range(2):
            for owner in OWNERS:
                gpus.resize(device, owner, GIB)
        sampler = Sampler(SimulatedSource(path))
        ours = engine_process(os.getpid(), "simulated")
        sampler.attribute(ours)
        result["sample_of_two_us"] = _best(sampler.sample)
        result["sample_and_decide_us"], result["scrape_us"] = _deciding(sampler, ours)
        gpus.close()
    lines = [f"{name.removesuffix('_us').replace('_', ' '):24} {value:8.0f} µs" for name, value in result.items()]
    try:
        nvml = Sampler(NvmlSource())
    except SourceError as error:
        lines.append(f"NVML: not measured, {str(error).removeprefix('NVML: ')}")
    else:
        result["nvml_devices"], result["nvml_sample_us"] = len(nvml.sample().devices), _best(nvml.sample)
        nvml.stop()
        lines.append(f"NVML, {result['nvml_devices']} devices          {result['nvml_sample_us']:8.0f} µs")
    sys.stdout.write("\n".join(lines) + "\n")
    return result


def _deciding(sampler: Sampler, ours: Ours) -> tuple[float, float]:
    """Microseconds of a sample with all that follows from it, the median; and of a scrape after that.

    One request finishes at each sample, so every one closes a window on both devices and is judged anew.
    """
    counts = Counts(2)
    runner = Runner(sampler, WatchdogConfig(), Nothing(), counts)
    runner.ready([DevicePlan(512 * MIB)] * 2, ours)
    took = []
    for finished in range(REQUESTS):
        began = time.perf_counter()
        sampler.sample()
        runner.observe(sampler.now(), Work(1, finished, 100 * finished, boundary=True), [Holdings(1)] * 2)
        took.append(time.perf_counter() - began)
    registry = alone(lambda: runner.status(sampler.now(), time.time()), counts)
    return sorted(took)[REQUESTS // 2] * 1e6, _best(lambda: generate_latest(registry), calls=2)


def _best(call: Callable[[], object], calls: int = CALLS) -> float:
    """Microseconds a call in the fastest of many rounds: what it costs, not what else the machine does."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - began) / calls)
    return min(rounds) * 1e6
