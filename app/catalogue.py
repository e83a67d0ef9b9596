"""The catalogue of the service's metrics: one row a family. Names and labels are a contract.

Families of a model carry `model_name` (the configured id, never what a client sent) and `engine` (always "0" now), as
vLLM's do, so that its dashboards port by a change of prefix. All label values are closed sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
MODEL_LABELS = ("model_name", "engine")

FINISHED_REASONS = ("stop", "length", "abort", "error")
REJECT_REASONS = ("queue_full", "draining", "context_length", "auth", "engine_unavailable")
FAIL_REASONS = ("request_timeout", "shut_down", "engine_unavailable", "engine_fault")
RESTART_REASONS = ("reload", "crash", "oom", "hang", "operator")
STATUS_CLASSES = ("2xx", "4xx", "5xx")

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 60, 80, 100, 120, 160, 320, 640, 2560),
)
TOKEN_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HTTP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
UP_TO_CONTEXT = ()
"""Stands for the steps 1, 2, 5, 10 … up to the context length."""


@dataclass(frozen=True)
class Family:
    """`values` are the label values that exist from the start; without them a series appears once it is known."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    values: Sequence[tuple[str, ...]] = field(default=((),))
    buckets: Sequence[float] = UP_TO_CONTEXT


def _enum(kind: Kind, name: str, text: str, *, model: bool = False, **labels: tuple[str, ...]) -> Family:
    names = (*MODEL_LABELS, *labels) if model else tuple(labels)
    return Family(kind, name, text, names, tuple(product(*labels.values())))


def _model(kind: Kind, name: str, text: str, buckets: Sequence[float] = UP_TO_CONTEXT) -> Family:
    return Family(kind, name, text, MODEL_LABELS, buckets=buckets)


def _info(name: str, text: str, *labels: str) -> Family:
    return Family("gauge", name, text, labels, values=())


SERVING = (
    _model("gauge", "ullage_num_requests_running", "Choices at the engine"),
    _model("gauge", "ullage_num_requests_waiting", "Choices that wait for a place at the engine"),
    _model("gauge", "ullage_num_requests_held", "Choices that wait for an engine to be there"),
    _model("gauge", "ullage_kv_cache_usage_perc", "Share of KV blocks in use, as a ratio from 0 to 1"),
    _model("counter", "ullage_prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache"),
    _model("counter", "ullage_prefix_cache_hits_total", "Prompt tokens found in the prefix cache"),
    _model("counter", "ullage_prompt_tokens_total", "Prompt tokens of choices that ended"),
    _model("counter", "ullage_prompt_tokens_cached_total", "Of those, tokens taken from the prefix cache"),
    _model("counter", "ullage_generation_tokens_total", "Generated tokens"),
    _model("counter", "ullage_num_preemptions_total", "Times a choice gave up its blocks to an older one"),
    _enum(
        "counter", "ullage_request_success_total", "Choices that ended", model=True, finished_reason=FINISHED_REASONS
    ),
    _enum("counter", "ullage_requests_rejected_total", "Requests refused before admission", reason=REJECT_REASONS),
    _enum("counter", "ullage_requests_failed_total", "Admitted choices that ended in an error", reason=FAIL_REASONS),
    _model("histogram", "ullage_time_to_first_token_seconds", "From admission to the first token", FIRST_TOKEN),
    _model("histogram", "ullage_inter_token_latency_seconds", "Between two tokens of a choice", TOKEN_GAP),
    _model(
        "histogram", "ullage_request_time_per_output_token_seconds", "Mean over a choice's tokens but one", TOKEN_GAP
    ),
    _model("histogram", "ullage_e2e_request_latency_seconds", "From admission to the end", LATENCY),
    _model("histogram", "ullage_request_queue_time_seconds", "From admission to the engine", LATENCY),
    _model("histogram", "ullage_request_prefill_time_seconds", "From the engine to the first token", LATENCY),
    _model("histogram", "ullage_request_decode_time_seconds", "From the first token to the last", LATENCY),
    _model("histogram", "ullage_request_prompt_tokens", "Prompt tokens of a choice"),
    _model("histogram", "ullage_request_generation_tokens", "Generated tokens of a choice"),
    _model("histogram", "ullage_iteration_tokens", "Tokens of a step; its count freezes on a stall", STEP_TOKENS),
)

IDENTITY = (
    _info("ullage_build_info", "What runs", "version", "commit", "cupy", "cuda_runtime", "driver", "python"),
    _info("ullage_model_info", "What is served", "architecture", "quantization", "context_length", "layer_split"),
    Family("gauge", "ullage_engine_up", "1 while an engine is ready"),
    Family("gauge", "ullage_engine_start_time_seconds", "Unix time at which the engine was ready"),
    _enum("counter", "ullage_engine_restarts_total", "Engines started after the first", reason=RESTART_REASONS),
)

HTTP_LABELS = ("handler", "method", "status")
HTTP_FAMILIES = (
    Family("counter", "http_requests_total", "HTTP requests answered", HTTP_LABELS, values=()),
    Family("histogram", "http_request_duration_seconds", "Until the last byte", HTTP_LABELS, (), HTTP),
)

CATALOGUE = SERVING + IDENTITY + HTTP_FAMILIES
