"""The watchdog's metrics: one table, and a collector that reads it at each scrape.

A row says what a family is called, what it means and how it is read off the status and the counts; adding one is
adding a row. What is unknown, and a device that is gone, has no series: nothing has to be removed. A scrape never
calls the source and never decides, so it answers while NVML hangs, which is when it is needed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from watchdog.counts import Counts, Histogram, Labels
from watchdog.snapshot import Reading
from watchdog.state import State
from watchdog.status import DeviceStatus, Status
from watchdog.trend import Slopes

Value = float | Histogram | None


@dataclass(frozen=True, slots=True)
class Scrape:
    status: Status
    counts: Counts


Series = Iterable[tuple[Labels, Value]]


@dataclass(frozen=True, slots=True)
class Row:
    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    labels: Labels
    read: Callable[[Scrape], Series]


def _each(value: Callable[[DeviceStatus], Value]) -> Callable[[Scrape], Series]:
    """One series a device."""
    return lambda scrape: [((str(device.device),), value(device)) for device in scrape.status.devices]


def _several(values: Callable[[DeviceStatus], Mapping[str, Value]]) -> Callable[[Scrape], Series]:
    """One series a device and word."""
    return lambda scrape: [
        ((str(device.device), word), value)
        for device in scrape.status.devices
        for word, value in values(device).items()
    ]


def _reading(value: Callable[[Reading], Value]) -> Callable[[Scrape], Series]:
    return _each(lambda device: None if device.reading is None else value(device.reading))


def _slope(value: Callable[[Slopes], float]) -> Callable[[Scrape], Series]:
    return _each(lambda device: None if device.slopes is None else value(device.slopes))


def _if_requests(read: Callable[[Scrape], Series]) -> Callable[[Scrape], Series]:
    """Nothing per request where no requests are seen."""
    return lambda scrape: read(scrape) if scrape.status.requests else ()


def _counted(
    counter: Callable[[Counts], Mapping[Labels, int] | Mapping[Labels, Histogram]],
) -> Callable[[Scrape], Series]:
    return lambda scrape: counter(scrape.counts).items()


def _device(name: str, text: str, read: Callable[[Scrape], Series], *labels: str) -> Row:
    return Row("gauge", f"ullage_vram_{name}", text, ("device", *labels), read)


def _ahead(device: DeviceStatus, unit: Literal["seconds", "requests"]) -> Value:
    """Until the reload floor: infinite where no confident trend leads there, absent where nothing is known."""
    if device.confidence is None:
        return None
    return math.inf if device.forecast is None else float(getattr(device.forecast, unit))


def _processes(device: DeviceStatus) -> Mapping[str, Value]:
    reading = device.reading
    return {} if reading is None else {"own": reading.own, "other": reading.other}


def _floors(device: DeviceStatus) -> Mapping[str, Value]:
    floors = device.floors
    return {} if floors is None else {"warn": floors.warn, "trim": floors.trim, "reload": floors.reload}


def _samples(device: DeviceStatus) -> Mapping[str, Value]:
    health = device.health
    good = health.samples_total - health.failures_total - health.fallbacks_total
    return {"ok": good, "nvml_error": health.failures_total, "fallback": health.fallbacks_total}


def _last_sample(scrape: Scrape) -> Series:
    """Unix time; the snapshot's own times are of a clock without an epoch."""
    for device in scrape.status.devices:
        age = device.health.age(scrape.status.at)
        yield (str(device.device),), None if age is None else scrape.status.wall - age


MEMORY = (
    _device("total_bytes", "Memory of the device", _reading(lambda reading: reading.total)),
    _device("used_bytes", "Held by processes", _reading(lambda reading: reading.used)),
    _device("free_bytes", "Free now; what requests use for a moment is not", _reading(lambda reading: reading.free)),
    _device("reserved_bytes", "Kept by the driver for itself", _reading(lambda reading: reading.reserved)),
    _device("runtime_free_bytes", "Free as the CUDA runtime says", _each(lambda device: device.runtime_free)),
    _device("idle_free_bytes", "Free when no request uses memory for a moment", _each(lambda device: device.idle_free)),
    _device("baseline_free_bytes", "Idle free memory at ready", _each(lambda device: device.baseline_free)),
    _device("free_low_watermark_bytes", "Lowest free since ready", _each(lambda device: device.lowest_free)),
    _device("process_bytes", "Held by the engine and by all else", _several(_processes), "scope"),
    _device(
        "attribution_info",
        "How own and other bytes are known",
        _several(lambda device: {} if device.reading is None else {device.reading.own_source: 1}),
        "source",
    ),
    _device(
        "ledger_bytes",
        "What the engine holds, by owner; unaccounted is what its own books do not explain",
        _several(lambda device: dict(device.ledger)),
        "owner",
    ),
    _device(
        "drift_bytes", "Change of free memory that the ledger does not explain", _each(lambda device: device.drift)
    ),
    _device("floor_bytes", "Idle free memory under which the watchdog acts", _several(_floors), "level"),
    _device(
        "tight",
        "1 if the device was under its warn floor at ready: then only its trend leads to acts",
        _each(lambda device: None if device.floors is None else float(device.floors.tight)),
    ),
    _device(
        "growth_bytes_per_request",
        "Robust slope of used memory; above 0 room shrinks",
        _if_requests(_slope(lambda slopes: slopes.per_request)),
    ),
    _device(
        "growth_bytes_per_second",
        "Robust slope of used memory; above 0 room shrinks",
        _slope(lambda slopes: slopes.per_second),
    ),
    _device(
        "trend_confidence_ratio",
        "Share of recent slopes that agree; under 0.5 no end is forecast",
        _each(lambda device: device.confidence),
    ),
    _device(
        "exhaustion_forecast_seconds",
        "Until the reload floor is reached",
        _each(lambda device: _ahead(device, "seconds")),
    ),
    _device(
        "exhaustion_forecast_requests",
        "Until the reload floor is reached",
        _if_requests(_each(lambda device: _ahead(device, "requests"))),
    ),
)

WATCHDOG = (
    Row(
        "gauge",
        "ullage_watchdog_state",
        "1 for the state the device is in",
        ("device", "state"),
        _several(lambda device: {state: float(state is device.state) for state in State}),
    ),
    Row(
        "gauge",
        "ullage_watchdog_last_sample_timestamp_seconds",
        "Unix time of the last good reading",
        ("device",),
        _last_sample,
    ),
    Row("counter", "ullage_watchdog_samples_total", "Readings attempted", ("device", "result"), _several(_samples)),
    Row(
        "counter",
        "ullage_watchdog_trims_total",
        "Rungs taken",
        ("device", "rung", "result"),
        _counted(lambda counts: counts.trims),
    ),
    Row(
        "counter",
        "ullage_watchdog_trim_returned_bytes_total",
        "Bytes that rungs gave back, as the source measured",
        ("device", "rung"),
        _counted(lambda counts: counts.trim_returned),
    ),
    Row(
        "histogram",
        "ullage_watchdog_trim_duration_seconds",
        "How long a rung took",
        ("rung",),
        _counted(lambda counts: counts.trim_seconds),
    ),
)

TABLE = MEMORY + WATCHDOG


class WatchdogCollector(Collector):
    """Turns the table into families when somebody scrapes. It is to be registered by whoever has the registry."""

    def __init__(self, status: Callable[[], Status], counts: Counts) -> None:
        self._status = status
        self._counts = counts

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        scrape = Scrape(self._status(), self._counts)
        for row in TABLE:
            known = [(labels, value) for labels, value in row.read(scrape) if value is not None]
            if known:
                yield _family(row, known)


def alone(status: Callable[[], Status], counts: Counts) -> CollectorRegistry:
    """A registry with nothing else in it, for a watchdog without a service."""
    registry = CollectorRegistry()
    registry.register(WatchdogCollector(status, counts))
    return registry


def expose(registry: CollectorRegistry, host: str, port: int) -> int:
    """Answer scrapes at http://host:port/metrics for as long as the process lives; the port, which 0 leaves open.

    Raises OSError when the address cannot be had.
    """
    server, _ = start_http_server(port, host, registry)
    return server.server_port


def _family(row: Row, known: list[tuple[Labels, float | Histogram]]) -> Metric:
    if row.kind == "histogram":
        histogram = HistogramMetricFamily(row.name, row.help, labels=row.labels)
        for labels, value in known:
            assert isinstance(value, Histogram)
            histogram.add_metric(labels, value.cumulative(), value.total)
        return histogram
    kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    family = kind(row.name, row.help, labels=row.labels)
    for labels, value in known:
        assert not isinstance(value, Histogram)
        family.add_metric(labels, value)
    return family
