"""The watchdog without a service, for any engine on the machine: memory, trend, forecast, metrics and alerts.

It sees no requests, so half a minute stands for one: the idle floor is the highest free reading of each, and the trend
goes over the last 64. It acts on nothing.
"""

import json
import math
import os
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from watchdog.actions import Action
from watchdog.attribution import UNKNOWN, Ours, family
from watchdog.config import WatchdogConfig
from watchdog.counts import Counts
from watchdog.floors import Level
from watchdog.metrics import alone, expose
from watchdog.nvml import NvmlSource
from watchdog.runner import DevicePlan, Runner
from watchdog.sampler import Sampler
from watchdog.simulated import SimulatedSource
from watchdog.snapshot import MIB, DeviceSnapshot, Holdings, OwnSource, Work
from watchdog.source import Source, SourceError
from watchdog.status import DeviceStatus, Status, as_json
from watchdog.trend import TrendClass

STANDS_FOR_A_REQUEST_S = 30.0
EVERY_S = 2.0
LINES_A_HEADING = 40
SETTINGS = WatchdogConfig(mode="dry-run")
WORDS = {
    TrendClass.GROWTH: "memory grows without end",
    TrendClass.FILL: "something fills towards a cap",
    TrendClass.FOREIGN: "another process takes memory",
}


@dataclass(frozen=True, slots=True)
class Options:
    """`every_s` None with `json` is: once. Raises ValueError for what makes no sense."""

    pid: int | None = None
    simulated: Path | None = None
    json: bool = False
    every_s: float | None = None
    metrics: str | None = None
    reserve_mib: int = 512

    def __post_init__(self) -> None:
        if self.every_s is not None and not 0.05 <= self.every_s < math.inf:
            raise ValueError(f"--every {self.every_s}: from 0.05 seconds on")
        if self.once and self.metrics is not None:
            raise ValueError("--metrics: is for watching; add --every to --json")
        if self.reserve_mib <= 0:
            raise ValueError(f"--reserve-mib {self.reserve_mib}: must be above 0")

    @property
    def once(self) -> bool:
        return self.json and self.every_s is None

    @property
    def address(self) -> tuple[str, int] | None:
        if self.metrics is None:
            return None
        host, _, port = self.metrics.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"--metrics {self.metrics}: expected PORT or HOST:PORT")
        return host or "127.0.0.1", int(port)


class Watching:
    """A source watched from now on; `look` says how things are. Raises SourceError for a process that is not there."""

    def __init__(self, source: Source, sampler: Sampler, options: Options) -> None:
        self._source = source
        self._sampler = sampler
        self._pid = options.pid
        self._rows = None if options.simulated is None else SimulatedSource(options.simulated)
        self._began = sampler.now()
        self.counts = Counts(len(source.cards))
        self._runner = Runner(sampler, SETTINGS, self, self.counts)
        plan = DevicePlan(options.reserve_mib * MIB)
        if self._pid is not None and not family(self._pid):
            raise SourceError(f"--pid {self._pid}: there is no such process")
        self._runner.ready([plan] * len(source.cards), self._ours())
        self.status = Status(self._began, time.time())

    def begin(self, action: Action) -> None:
        raise AssertionError("a dry run begins nothing")

    def look(self) -> Status:
        """Takes in what the sampler has read since the last look."""
        now = self._sampler.now()
        self._sampler.attribute(self._ours())
        finished = int((now - self._began) / STANDS_FOR_A_REQUEST_S)
        work = Work(1, finished, 0, boundary=True)
        self._runner.observe(now, work, [Holdings(1)] * len(self._source.cards))
        self.status = replace(self._runner.status(now, time.time()), requests=False)
        return self.status

    def json(self) -> dict[str, Any]:
        """The last look, as one line of JSON shows it."""
        devices = as_json(self.status)
        for device, shown in zip(devices, self._sampler.snapshot().devices, strict=True):
            device["processes"] = self._processes(shown)
        alerts = [
            {"device": device.device, "kind": kind, "text": text}
            for device in self.status.devices
            for kind, text in concerns(device).items()
        ]
        at = datetime.fromtimestamp(self.status.wall, UTC).isoformat(timespec="milliseconds")
        return {"time": at.replace("+00:00", "Z"), "pid": self._pid, "devices": devices, "alerts": alerts}

    def _ours(self) -> Ours:
        if self._pid is None:
            return UNKNOWN
        known: OwnSource = "nvml" if self._rows is None else "simulated"
        return Ours(family(self._pid), known)

    def _processes(self, shown: DeviceSnapshot) -> list[dict[str, Any]] | None:
        if self._rows is not None:
            held: dict[int, dict[str, int]] = {}
            for row in self._rows.rows(shown.device):
                held.setdefault(row.pid, {})[row.owner] = row.held
            return [{"pid": pid, "bytes": sum(of.values()), "owners": of} for pid, of in sorted(held.items())]
        if shown.holders is None:
            return None
        return [{"pid": pid, "bytes": size} for pid, size in sorted(shown.holders.items())]


def watch(options: Options, out: TextIO) -> int:
    """Watch until interrupted, or once. Raises SourceError where there is nothing to read, OSError for the port."""
    address = options.address
    source: Source = NvmlSource() if options.simulated is None else SimulatedSource(options.simulated)
    sampler = Sampler(source)
    watching = Watching(source, sampler, options)
    if options.once:
        if isinstance(source, SimulatedSource):
            source.settle()
        sampler.sample()
        watching.look()
        out.write(json.dumps(watching.json()) + "\n")
        sampler.stop()
        return 0
    sampler.start()
    if address is not None:
        port = expose(alone(lambda: watching.status, watching.counts), *address)
        if not options.json:
            out.write(f"metrics: http://{address[0]}:{port}/metrics\n")
    try:
        _repeat(watching, options, out)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # nobody reads: leave without a second complaint
    finally:
        sampler.stop()
    return 0


def _repeat(watching: Watching, options: Options, out: TextIO) -> None:
    printed, known = 0, dict[tuple[int, str], str]()
    while True:
        time.sleep(EVERY_S if options.every_s is None else options.every_s)
        status = watching.look()
        if options.json:
            out.write(json.dumps(watching.json()) + "\n")
            out.flush()
            continue
        if printed % LINES_A_HEADING == 0:
            out.write(HEADING + "\n")
        printed += 1
        clock = datetime.fromtimestamp(status.wall).strftime("%H:%M:%S")
        now = {(device.device, kind): text for device in status.devices for kind, text in concerns(device).items()}
        for device in status.devices:
            out.write(f"{clock} {line(device)}\n")
        for number, kind in now.keys() - known.keys():
            out.write(f"{clock} ALERT device {number}: {now[number, kind]}\n")
        for number, kind in known.keys() - now.keys():
            out.write(f"{clock} over  device {number}: {kind}\n")
        out.flush()
        known = now


def concerns(device: DeviceStatus) -> dict[str, str]:
    """What somebody should know, in words, by kind; no kind twice."""
    if device.reading is None:
        return {"blind": device.health.error or "no reading of late"} if device.health.samples_total else {}
    found: dict[str, str] = {}
    if device.kind in WORDS:
        found[device.kind.value] = WORDS[device.kind] + _pace(device)
    if device.floors is not None and device.idle_free is not None and not device.floors.tight:
        level = device.floors.level(device.idle_free)
        if level is not Level.OK:
            found["low"] = f"{device.idle_free / MIB:.0f} MiB free at most, under the {level.name.lower()} floor"
    return found


def _pace(device: DeviceStatus) -> str:
    if device.slopes is None:
        return ""
    pace = f", {device.slopes.per_second * 3600 / MIB:.1f} MiB an hour"
    if device.forecast is None:
        return pace
    return f"{pace}: {device.forecast.seconds / 60:.0f} minutes to the reload floor"


HEADING = (
    f"{'time':8} {'device':6} {'free':>10} {'idle':>10} {'lowest':>10} {'own':>10} {'other':>10} "
    f"{'class':9} {'MiB/h':>8} {'minutes':>8} state   (MiB; minutes to the reload floor)"
)


def line(device: DeviceStatus) -> str:
    """One device as a line under HEADING; what is not known is `-`."""
    reading = device.reading
    sizes = (
        None if reading is None else reading.free,
        device.idle_free,
        device.lowest_free,
        None if reading is None else reading.own,
        None if reading is None else reading.other,
    )
    columns = " ".join(_number(size, MIB, "10,.0f") for size in sizes)
    pace = _number(None if device.slopes is None else device.slopes.per_second * 3600, MIB, "8.1f")
    left = _number(None if device.forecast is None else device.forecast.seconds, 60, "8.0f")
    return f"{device.device:6} {columns} {device.kind.value:9} {pace} {left} {device.state.value}"


def _number(value: float | None, unit: float, form: str) -> str:
    width = int(form.split(",")[0].split(".")[0])
    return f"{'-':>{width}}" if value is None else format(value / unit, f">{form}")
