"""The one registry of the service. The engine may come and go; these counters do not reset over it.

Values are plain Python numbers that the scheduler adds to once a step or once a choice; a collector turns them into
families when somebody scrapes. Counters exist at zero, gauges are absent until they are known, and there are no
`_created` series, which would double the count.
"""

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from app.catalogue import (
    CATALOGUE,
    FAIL_REASONS,
    HTTP_LABELS,
    MODEL_LABELS,
    RESTART_REASONS,
    STATUS_CLASSES,
    UP_TO_CONTEXT,
    Family,
)
from app.generation import Generation
from app.record import Record
from engine.messages import StepStats

Labels = tuple[str, ...]
ENGINE = "0"
NO_FINISH = {"cancelled": "abort", "failed": "error"}
"""How the catalogue calls the outcomes that clients never see as a finish reason."""

ENGINE_TOTALS = (
    ("ullage_prefix_cache_queries_total", "prefix_queries_total"),
    ("ullage_prefix_cache_hits_total", "prefix_hits_total"),
    ("ullage_num_preemptions_total", "preemptions_total"),
)
"""Counters of ours that follow an engine's own, which start anew with each engine."""


class Histogram:
    """Counts by bucket; `le` is inclusive, as Prometheus has it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to the first that is not below `limit`."""
    steps = [1.0]
    while steps[-1] < limit:
        steps.append(steps[-1] * (2.5 if str(steps[-1]).startswith("2") else 2))
    return tuple(steps)


class ServingMetrics(Collector):
    """All of the catalogue, and the scheduler's observer.

    `gauges` is asked at each scrape for the gauges of the moment by name; what it leaves out is absent.
    `handlers` are the route templates, `(path, method)`.
    """

    def __init__(
        self,
        model_name: str,
        context_length: int,
        handlers: Sequence[tuple[str, str]],
        gauges: Callable[[], Mapping[str, float]],
    ) -> None:
        self._model: Labels = (model_name, ENGINE)
        self._gauges = gauges
        self._counters: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        self._infos: dict[str, Labels] = {}
        self._bounds: dict[str, Sequence[float]] = {}
        self._last: StepStats | None = None
        for family in CATALOGUE:
            values = family.values
            if family.labels == HTTP_LABELS:
                values = [(*handler, status) for handler in handlers for status in STATUS_CLASSES]
            self._create(family, values, one_two_five(context_length))
        self._generated = self._counters["ullage_generation_tokens_total"]
        self._gap = self._of_model("ullage_inter_token_latency_seconds")
        self.registry = CollectorRegistry()
        self.registry.register(self)
        for process in (ProcessCollector, PlatformCollector, GCCollector):
            process(registry=self.registry)

    def _create(self, family: Family, values: Sequence[Labels], context_steps: Sequence[float]) -> None:
        prefix = self._model if family.labels[:2] == MODEL_LABELS else ()
        if family.kind == "counter":
            self._counters[family.name] = {prefix + value: 0 for value in values}
        elif family.kind == "histogram":
            bounds = context_steps if family.buckets == UP_TO_CONTEXT else family.buckets
            self._bounds[family.name] = bounds
            self._histograms[family.name] = {prefix: Histogram(bounds)} if prefix else {}

    def _of_model(self, name: str) -> Histogram:
        return self._histograms[name][self._model]

    def _count(self, name: str, amount: float, labels: Labels) -> None:
        series = self._counters[name]
        assert labels in series, f"{name}{labels} was not created at zero"
        series[labels] += amount

    def tell(self, name: str, *labels: str) -> None:
        """Set an info metric, whose labels are the information."""
        self._infos[name] = labels

    # The scheduler's observer.

    def request_admitted(self, generation: Generation) -> None:
        """Nothing is counted before it ends."""

    def rejected(self, reason: str) -> None:
        self._count("ullage_requests_rejected_total", 1, (reason,))

    def first_token(self, seconds: float) -> None:
        self._of_model("ullage_time_to_first_token_seconds").observe(seconds)

    def tokens(self, count: int) -> None:
        self._generated[self._model] += count

    def token_gaps(self, seconds: list[float]) -> None:
        for gap in seconds:
            self._gap.observe(gap)

    def step(self, stats: StepStats) -> None:
        self._of_model("ullage_iteration_tokens").observe(stats.decode_rows + stats.prefill_tokens)
        last, self._last = self._last, stats
        for name, field in ENGINE_TOTALS:
            growth = getattr(stats, field) - (getattr(last, field) if last else 0)
            if growth:
                self._count(name, growth, self._model)

    def finished(self, record: Record) -> None:
        outcome = record.outcome
        assert outcome is not None
        reason = NO_FINISH.get(outcome, outcome)
        self._count("ullage_request_success_total", 1, (*self._model, reason))
        if record.failure is not None:
            code = record.failure.code
            known = code if code in FAIL_REASONS else "engine_fault"
            self._count("ullage_requests_failed_total", 1, (known,))
        self._count("ullage_prompt_tokens_total", len(record.prompt_ids), self._model)
        self._count("ullage_prompt_tokens_cached_total", record.cached_tokens or 0, self._model)
        self._of_model("ullage_request_prompt_tokens").observe(len(record.prompt_ids))
        self._of_model("ullage_request_generation_tokens").observe(len(record.generated_ids))
        self._observe_times(record)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks of the engine there is; before its first step none is in use."""
        return self._last.kv_blocks_used / self._last.kv_blocks if self._last else 0.0

    def engine_restarted(self, reason: str) -> None:
        assert reason in RESTART_REASONS
        self._last = None
        self._count("ullage_engine_restarts_total", 1, (reason,))

    def _observe_times(self, record: Record) -> None:
        assert record.finished_at is not None
        self._of_model("ullage_e2e_request_latency_seconds").observe(record.finished_at - record.admitted_at)
        if record.submitted_at is None:
            return
        self._of_model("ullage_request_queue_time_seconds").observe(record.submitted_at - record.admitted_at)
        if record.first_token_at is None or record.last_token_at is None:
            return
        decode = record.last_token_at - record.first_token_at
        self._of_model("ullage_request_prefill_time_seconds").observe(record.first_token_at - record.submitted_at)
        self._of_model("ullage_request_decode_time_seconds").observe(decode)
        later = len(record.generated_ids) - 1
        if later > 0:
            self._of_model("ullage_request_time_per_output_token_seconds").observe(decode / later)

    def http_request(self, handler: str, method: str, status: int, seconds: float) -> None:
        """One answered request; `handler` and `method` are of the closed sets given at the start."""
        labels = (handler, method, f"{status // 100}xx")
        self._count("http_requests_total", 1, labels)
        series = self._histograms["http_request_duration_seconds"]
        if labels not in series:  # not at the start: a ladder of buckets for each pair would be most of the scrape
            series[labels] = Histogram(self._bounds["http_request_duration_seconds"])
        series[labels].observe(seconds)

    # The scrape.

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        gauges = self._gauges()
        for family in CATALOGUE:
            if family.kind == "counter":
                yield self._counter(family)
            elif family.kind == "histogram":
                yield self._histogram(family)
            elif family.name in self._infos:
                info = GaugeMetricFamily(family.name, family.help, labels=family.labels)
                info.add_metric(self._infos[family.name], 1)
                yield info
            elif family.name in gauges:
                gauge = GaugeMetricFamily(family.name, family.help, labels=family.labels)
                gauge.add_metric(self._model if family.labels else (), gauges[family.name])
                yield gauge

    def _counter(self, family: Family) -> Metric:
        counter = CounterMetricFamily(family.name, family.help, labels=family.labels)
        for labels, value in self._counters[family.name].items():
            counter.add_metric(labels, value)
        return counter

    def _histogram(self, family: Family) -> Metric:
        metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, histogram in self._histograms[family.name].items():
            metric.add_metric(labels, histogram.cumulative(), histogram.total)
        return metric


def build_labels(version: str) -> Labels:
    """Values of ullage_build_info; what this build does not use is empty."""
    return (version, "", "", "", "", platform.python_version())
