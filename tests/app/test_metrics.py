"""The exposition: names and labels of the catalogue, values that move, series that are there from the start."""

import itertools
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.catalogue import CATALOGUE, FINISHED_REASONS, HTTP_FAMILIES
from app.metrics import Histogram, one_two_five
from tests.app.running import NotYet, Running, says, service

CHAT = "/v1/chat/completions"
MODEL = {"model_name", "engine"}
BODY = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}

CONTRACT = {
    **dict.fromkeys(
        (
            "ullage_num_requests_running",
            "ullage_num_requests_waiting",
            "ullage_num_requests_held",
            "ullage_kv_cache_usage_perc",
            "ullage_prefix_cache_queries_total",
            "ullage_prefix_cache_hits_total",
            "ullage_prompt_tokens_total",
            "ullage_prompt_tokens_cached_total",
            "ullage_generation_tokens_total",
            "ullage_num_preemptions_total",
            "ullage_time_to_first_token_seconds",
            "ullage_inter_token_latency_seconds",
            "ullage_request_time_per_output_token_seconds",
            "ullage_e2e_request_latency_seconds",
            "ullage_request_queue_time_seconds",
            "ullage_request_prefill_time_seconds",
            "ullage_request_decode_time_seconds",
            "ullage_request_prompt_tokens",
            "ullage_request_generation_tokens",
            "ullage_iteration_tokens",
        ),
        MODEL,
    ),
    "ullage_request_success_total": MODEL | {"finished_reason"},
    "ullage_requests_rejected_total": {"reason"},
    "ullage_requests_failed_total": {"reason"},
    "ullage_build_info": {"version", "commit", "cupy", "cuda_runtime", "driver", "python"},
    "ullage_model_info": {"architecture", "quantization", "context_length", "layer_split"},
    "ullage_engine_up": set(),
    "ullage_engine_start_time_seconds": set(),
    "ullage_engine_restarts_total": {"reason"},
    "http_requests_total": {"handler", "method", "status"},
    "http_request_duration_seconds": {"handler", "method", "status"},
}
"""Written out here once more: a rename breaks dashboards, so it has to be made twice."""

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(running: Running) -> Samples:
    text = httpx.get(running.ops_url + "/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum over the series of that name that have these labels."""
    return sum(
        value for (found, given), value in samples.items() if found == name and labels.items() <= dict(given).items()
    )


def own(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith(("ullage_", "http_"))}


def test_the_catalogue_is_the_contract() -> None:
    assert {family.name: set(family.labels) for family in CATALOGUE} == CONTRACT
    assert all(family.help for family in CATALOGUE)


def test_both_formats_parse_and_have_every_family(hello: Running) -> None:
    httpx.post(hello.url + CHAT, json=BODY)
    text = httpx.get(hello.ops_url + "/metrics")
    assert text.headers["content-type"].startswith("text/plain")
    families = list(parse_text(text.text))
    opened = httpx.get(hello.ops_url + "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert {family.name for family in parse_openmetrics(opened.text)} == {family.name for family in families}
    kinds = {family.name + ("_total" if family.type == "counter" else ""): family.type for family in families}
    assert own(kinds) == set(CONTRACT)
    assert kinds == {**kinds, **{family.name: family.kind for family in CATALOGUE}}
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            if name in CONTRACT:
                assert set(sample.labels) - {"le"} == CONTRACT[name], sample.name
                assert sample.labels.get("model_name", "bytes") == "bytes"
                assert sample.labels.get("engine", "0") == "0"


def test_counters_are_there_at_zero_and_gauges_only_when_known() -> None:
    with service(engine={"step_s": 60.0}) as running:
        samples = scrape(running)
        for reason in FINISHED_REASONS:
            key = ("finished_reason", reason)
            found = [
                value
                for (name, labels), value in samples.items()
                if name == "ullage_request_success_total" and key in labels
            ]
            assert found == [0]
        for name in ("ullage_requests_rejected_total", "ullage_engine_restarts_total", "ullage_requests_failed_total"):
            assert {value for (found, _), value in samples.items() if found == name} == {0}
        assert total(samples, "ullage_engine_up") == 1
        assert total(samples, "ullage_engine_start_time_seconds") > 1e9
        assert total(samples, "ullage_model_info", architecture="llama", quantization="F32", context_length="4096") == 1
    with service(wait_ready=False, engine_type=NotYet) as running:
        samples = scrape(running)
        names = {name for name, _ in samples}
        assert total(samples, "ullage_engine_up") == 0
        assert not names & {"ullage_engine_start_time_seconds", "ullage_kv_cache_usage_perc", "ullage_model_info"}


def test_a_request_moves_the_counters() -> None:
    with service(says("0123456789")) as running:
        before = scrape(running)
        httpx.post(running.url + CHAT, json=BODY)
        httpx.post(running.url + CHAT, json={**BODY, "max_tokens": 4, "n": 2})
        after = scrape(running)
        prompt = len("user: hi\nassistant: ")

        def grown(name: str, **labels: str) -> float:
            return total(after, name, **labels) - total(before, name, **labels)

        assert grown("ullage_request_success_total", finished_reason="stop") == 1
        assert grown("ullage_request_success_total", finished_reason="length") == 2
        assert grown("ullage_prompt_tokens_total") == 3 * prompt
        assert grown("ullage_prefix_cache_queries_total") == 3 * prompt
        assert grown("ullage_generation_tokens_total") == 11 + 2 * 4
        assert grown("ullage_time_to_first_token_seconds_count") == 3
        assert grown("ullage_inter_token_latency_seconds_count") == 10 + 2 * 3
        assert grown("ullage_request_generation_tokens_sum") == 11 + 2 * 4
        assert grown("ullage_request_prompt_tokens_bucket", le="20.0") == 3
        assert grown("ullage_iteration_tokens_sum") == 11 + 2 * 4
        for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
            assert grown(f"ullage_{name}_seconds_count") == 3
        assert grown("http_requests_total", handler=CHAT, method="POST", status="2xx") == 2
        assert grown("http_request_duration_seconds_count", handler=CHAT) == 2


def test_what_is_refused_is_counted_by_its_reason() -> None:
    settings = {"max_queue": 1}
    engine: Any = {"step_s": 0.001, "max_batch": 1, "max_context": 64}
    with service(lambda submit: itertools.repeat(65), engine=engine, settings=settings, api_keys=["k"]) as running:
        headers = {"authorization": "Bearer k"}
        httpx.get(running.v1 + "/models")
        httpx.post(
            running.url + CHAT, json={**BODY, "messages": [{"role": "user", "content": "x" * 99}]}, headers=headers
        )
        httpx.post(running.url + CHAT, json={**BODY, "n": 9}, headers=headers)
        running.call(lambda inside: inside.scheduler.drain())
        httpx.post(running.url + CHAT, json=BODY, headers=headers)
        samples = scrape(running)
        for reason in ("auth", "context_length", "queue_full", "draining"):
            assert total(samples, "ullage_requests_rejected_total", reason=reason) == 1, reason


def test_a_client_makes_no_series(hello: Running) -> None:
    before = {key for key in scrape(hello) if key[0].startswith("ullage_")}
    for path in ("/a", "/b", "/v1/models/a", "/v1/models/b"):
        httpx.get(hello.url + path)
    httpx.request("PATCH", hello.url + "/live")
    httpx.post(hello.url + CHAT, json={**BODY, "model": "made-up", "user": "made-up"})
    after = scrape(hello)
    assert {key for key in after if key[0].startswith("ullage_")} == before
    assert not any("made-up" in str(key) for key in after)
    handlers = {dict(labels)["handler"] for name, labels in after if name == "http_requests_total"}
    assert handlers == {
        "/live",
        "/ready",
        "/health",
        "/v1/models",
        "/v1/models/{id}",
        CHAT,
        "/v1/completions",
        "/metrics",
        "other",
    }
    assert len(after) < 1000


def test_an_engine_that_dies_resets_nothing() -> None:
    with service(says("0123456789")) as running:
        httpx.post(running.url + CHAT, json=BODY)
        before = scrape(running)
        running.call(lambda inside: running.engine.die())
        running.wait_until(lambda inside: inside.supervisor.phase == "ready" and len(running.engines) == 2)
        httpx.post(running.url + CHAT, json=BODY)
        after = scrape(running)
        counters = {family.name for family in CATALOGUE if family.kind == "counter"} - {HTTP_FAMILIES[0].name}
        assert all(after[key] >= value for key, value in before.items() if key[0] in counters)
        assert total(after, "ullage_engine_restarts_total", reason="crash") == 1
        name = "ullage_prefix_cache_queries_total"
        assert total(after, name) == 2 * total(before, name)


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert histogram.total == 8


@pytest.mark.parametrize(
    ("limit", "steps"), [(1, (1,)), (2, (1, 2)), (60, (1, 2, 5, 10, 20, 50, 100)), (100, (1, 2, 5, 10, 20, 50, 100))]
)
def test_one_two_five(limit: int, steps: tuple[int, ...]) -> None:
    assert one_two_five(limit) == steps
