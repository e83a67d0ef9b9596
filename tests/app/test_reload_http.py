"""A reload as clients, balancers and Prometheus see it."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.patience import Backoff, Patience
from app.service import Service
from app.streaming import COMMENT
from engine.config import EngineConfig
from engine.fake import FakeEngine
from engine.messages import Ready
from tests.app.raw_client import Answers, connect, events, post
from tests.app.running import Running, service

CHAT = "/v1/chat/completions"
BODY = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}
LONG = {**BODY, "stream": True, "max_tokens": 300}
ENDLESS = {"step_s": 0.002, "max_context": 1 << 20}


class Gate(FakeEngine):
    """Every engine but the first is ready when `open` is set, and can be killed."""

    open = threading.Event()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.unkillable = self.unkillable and self.generation == 1

    async def load(self, config: EngineConfig, restore: bool) -> Ready:
        ready = await super().load(config, restore)
        while self.generation > 1 and not self.open.is_set():
            await self._pass(None)
        return ready


@pytest.fixture(autouse=True)
def closed() -> None:
    Gate.open.clear()


@contextmanager
def gated(**options: Any) -> Iterator[Running]:
    patience = Patience(Backoff(first_s=0.0), reap_s=0.05, stop_s=0.05)
    engine = {**ENDLESS, **options.pop("engine", {})}
    with service(
        lambda submit: itertools.repeat(ord("x")),
        engine=engine,
        engine_type=Gate,
        **{"patience": patience, "keepalive_s": 0.05, **options},
    ) as running:
        try:
            yield running
        finally:
            Gate.open.set()


def begin(running: Running) -> None:
    """A reload, up to the load of the next engine."""
    running.call(lambda inside: inside.supervisor.reload("operator"))
    running.wait_until(lambda inside: inside.supervisor.status()["phase"] in ("load", "warmup"))


def is_silent(connection: Any) -> bool:
    connection.settimeout(0.15)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return True
    finally:
        connection.settimeout(10)


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk != "[DONE]")


def metric(running: Running, name: str, **labels: str) -> float:
    scrape = httpx.get(running.ops_url + "/metrics").text
    samples = [s for family in text_string_to_metric_families(scrape) for s in family.samples]
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@pytest.mark.parametrize("stream", [True, False])
def test_who_comes_during_a_reload_gets_no_headers_until_it_is_over(stream: bool) -> None:
    with gated() as running:
        begin(running)
        with connect(running.url) as connection:
            connection.sendall(post(CHAT, {**BODY, "stream": stream, "max_tokens": 5}))
            running.wait_until(lambda inside: inside.scheduler.held == 1)
            assert is_silent(connection)
            assert metric(running, "ullage_num_requests_held") == 1
            assert metric(running, "ullage_reload_in_progress") == 1
            Gate.open.set()
            answers = Answers(connection)
            assert answers.head() == 200
            assert b"x" in answers.body()
        running.wait_until(lambda inside: not inside.supervisor.reloading)
        assert metric(running, "ullage_request_held_seconds_count") == 1
        assert metric(running, "ullage_reload_in_progress") == 0
        assert metric(running, "ullage_requests_lost_total") == 0


def test_who_was_there_before_hears_keep_alives_and_goes_on() -> None:
    with gated() as running, connect(running.url) as connection:
        connection.sendall(post(CHAT, LONG))
        answers = Answers(connection)
        assert answers.head() == 200
        running.wait_until(lambda inside: running.engines[0].steps > 5)
        begin(running)
        chunks = []
        for chunk in answers.chunks():
            chunks.append(chunk)
            if chunk == COMMENT and len(chunks) > 2 and chunks[-2] == COMMENT:
                Gate.open.set()
        assert text_of(events(b"".join(chunks))) == "x" * 300
        assert events(b"".join(chunks))[-1] == "[DONE]"
        running.wait_until(lambda inside: not inside.supervisor.reloading)
        assert metric(running, "ullage_requests_replayed_total", stage="decode") == 1
        assert metric(running, "ullage_reloads_total", reason="operator", result="ok") == 1
        assert metric(running, "ullage_reloads_total") == 1
        assert metric(running, "ullage_engine_restarts_total", reason="operator") == 1
        for phase in ("drain", "checkpoint", "teardown", "load", "warmup", "replay", "total"):
            assert metric(running, "ullage_reload_phase_duration_seconds_count", phase=phase) == 1
        assert metric(running, "ullage_replay_recomputed_tokens_total") > 5
        assert metric(running, "ullage_stream_max_gap_seconds_count") == 1
        assert metric(running, "ullage_generation_tokens_total") == 300, "counters go on over engines"
        assert metric(running, "ullage_requests_lost_total") == 0


def test_after_a_while_it_is_sent_away_with_a_time_to_come_back() -> None:
    with gated() as running:
        begin(running)
        running.call(lambda inside: setattr(inside.scheduler._held, "_patience_s", 0.1))
        running.call(lambda inside: inside.scheduler.expect_engine(17.0))
        answer = httpx.post(running.url + CHAT, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert answer.headers["retry-after"] in ("16", "17")
        assert metric(running, "ullage_requests_lost_total") == 0
        assert metric(running, "ullage_request_success_total") == 0
        assert metric(running, "ullage_requests_rejected_total", reason="engine_unavailable") == 1


def test_held_time_does_not_count_towards_the_timeout() -> None:
    with gated(settings={"request_timeout": 0.3}) as running, connect(running.url) as connection:
        begin(running)
        connection.sendall(post(CHAT, {**BODY, "max_tokens": 5}))
        running.wait_until(lambda inside: inside.scheduler.held == 1)
        for _ in range(4):
            assert is_silent(connection)
        Gate.open.set()
        answers = Answers(connection)
        assert answers.head() == 200
        answers.body()
        connection.sendall(post(CHAT, {**BODY, "max_tokens": 10_000}))
        assert answers.head() == 504, "from its admission on it does"


@pytest.mark.parametrize("readiness", ["hold", "shed"])
def test_what_balancers_are_told(readiness: str) -> None:
    with gated(settings={"reload_readiness": readiness}) as running:
        assert httpx.get(running.url + "/ready").status_code == 200
        begin(running)
        assert httpx.get(running.url + "/live").status_code == 200
        for path in ("/ready", "/health"):
            answer = httpx.get(running.url + path)
            assert answer.status_code == (503 if readiness == "shed" else 200)
            if readiness == "shed":
                assert 1 <= int(answer.headers["retry-after"]) <= 60
        with connect(running.url) as connection:
            connection.sendall(post(CHAT, {**BODY, "max_tokens": 5}))
            running.wait_until(lambda inside: inside.scheduler.held == 1)
            Gate.open.set()
            assert Answers(connection).head() == 200, "whoever comes all the same is held all the same"
        running.wait_until(lambda inside: not inside.supervisor.reloading)
        assert httpx.get(running.url + "/ready").status_code == 200


def test_an_engine_that_cannot_be_killed_is_the_end_of_being_alive() -> None:
    def is_stuck(inside: Service) -> bool:
        return inside.supervisor.phase == "stuck"

    with gated(engine={"unkillable": True}) as running:
        running.call(lambda inside: inside.supervisor.reload("operator"))
        running.wait_until(is_stuck)
        for path in ("/live", "/ready"):
            answer = httpx.get(running.url + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stuck")
        assert httpx.post(running.url + CHAT, json=BODY).status_code == 503
        Gate.open.set()
        running.call(lambda inside: running.engines[0].reap())
        running.wait_until(lambda inside: inside.supervisor.phase == "ready")
        assert httpx.get(running.url + "/live").status_code == 200


def test_one_poisonous_request_is_an_error_event_and_no_loss() -> None:
    Gate.open.set()
    poison = ord("P")
    with gated(engine={"poison": poison}) as running, connect(running.url) as connection:
        connection.sendall(post(CHAT, LONG))
        answers = Answers(connection)
        assert answers.head() == 200
        bad = {"model": "bytes", "prompt": [poison], "stream": True}
        with httpx.stream("POST", running.url + "/v1/completions", json=bad) as answer:
            assert answer.status_code == 200
            told = events(answer.read())
        assert told[-1]["error"]["code"] == "poison"
        assert text_of(events(answers.body())) == "x" * 300
        running.wait_until(lambda inside: not inside.supervisor.reloading)
        assert metric(running, "ullage_requests_failed_total", reason="poison") == 1
        assert metric(running, "ullage_requests_failed_total") == 1
        assert metric(running, "ullage_requests_lost_total") == 0
        assert metric(running, "ullage_engine_restarts_total", reason="crash") >= 3
        assert metric(running, "ullage_reloads_total", reason="engine_fault", result="ok") >= 3


def test_what_is_lost_is_counted() -> None:
    class Never(FakeEngine):
        async def load(self, config: EngineConfig, restore: bool) -> Ready:
            if self.generation > 1:
                self.die("broken for good")
            return await super().load(config, restore)

    patience = Patience(Backoff(first_s=0.0, tries=2))
    with (
        service(lambda submit: itertools.repeat(1), engine=ENDLESS, engine_type=Never, patience=patience) as running,
        connect(running.url) as connection,
    ):
        connection.sendall(post(CHAT, {**LONG, "max_tokens": 10_000}))
        answers = Answers(connection)
        assert answers.head() == 200
        running.wait_until(lambda inside: running.engines[0].steps > 5)
        running.call(lambda inside: running.engines[0].kill())
        assert events(answers.body())[-1]["error"]["code"] == "engine_unavailable"
        running.wait_until(lambda inside: not inside.supervisor.reloading)
        assert metric(running, "ullage_requests_lost_total", reason="reload") == 1
        assert metric(running, "ullage_requests_lost_total") == 1
        assert metric(running, "ullage_reloads_total", reason="engine_fault", result="failed") == 1
