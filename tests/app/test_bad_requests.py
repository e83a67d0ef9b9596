"""What a client may do wrong, and what it is told: an OpenAI error object, each time, that never repeats its input."""

import itertools
import json
import time
from typing import Any

import httpx
import openai
import pytest

from tests.app.raw_client import Answers, connect, post
from tests.app.running import NotYet, Running, service

CHAT = "/v1/chat/completions"
CANARY = "canary-5d1f"
MIB = 1 << 20
ENDLESS: Any = {"step_s": 0.001, "max_batch": 1, "max_context": 1 << 30}


def body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "messages": [{"role": "user", "content": content}], **fields}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert CANARY not in answer.text
    assert len(answer.content) < 1000
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", f"/{CANARY}", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", f"/v1/models/{CANARY}", 404, "model_not_found"),
        ("GET", "/v1/models/a%2F..%2Fb", 404, "model_not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),
        ("GET", "/admin/vram", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/live", 405, "method_not_allowed"),
        ("PATCH", "/v1/completions", 405, "method_not_allowed"),
    ],
)
def test_routes(hello: Running, method: str, path: str, status: int, code: str) -> None:
    answer = httpx.request(method, hello.url + path)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        CANARY.encode(),
        b'{"model": "bytes", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "bytes", "messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"model": "bytes", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "bytes", "messages": [{"role": "user", "content": "x"}], "temperature": -Infinity}',
        b'{"model": "bytes", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"model": "bytes", "messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5000 + b"}",
        b'{"model": "bytes", "messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model": "bytes", "metadata": ' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
        b"[]",
        b"null",
        b'"text"',
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_bodies_that_are_no_request(hello: Running, path: str, raw: bytes) -> None:
    answer = httpx.post(hello.url + path, content=raw)
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": CANARY}, "temperature"),
        ({"stop": [CANARY, CANARY, CANARY, CANARY, CANARY]}, "stop"),
        ({"messages": [{"role": CANARY, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": CANARY}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "function", "function": {"name": CANARY}}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": CANARY}}}, "response_format"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"content": "refuse me"}, "messages"),
    ],
)
def test_the_parameter_is_named(hello: Running, fields: dict[str, Any], param: str) -> None:
    answer = httpx.post(hello.url + CHAT, json=body(**fields))
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize("stream", [True, False])
def test_an_unknown_model(hello: Running, stream: bool) -> None:
    answer = httpx.post(hello.url + CHAT, json=body(model=CANARY, stream=stream))
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'bytes'" in error["message"]


def test_the_sdk_raises_what_its_users_expect(hello: Running) -> None:
    client = openai.OpenAI(base_url=hello.v1, api_key="unused", max_retries=0)
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="bytes", messages=[{"role": "user", "content": "hi"}], response_format={"type": "json_object"}
        )
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "response_format")


@pytest.mark.parametrize(("length", "status"), [(4095, 200), (4096, 400), (100_000, 400)])
def test_a_prompt_over_the_context(hello: Running, length: int, status: int) -> None:
    steps = hello.call(lambda inside: hello.engine.steps)
    answer = httpx.post(hello.url + "/v1/completions", json={"model": "bytes", "prompt": "x" * length})
    assert answer.status_code == status
    if status == 400:
        error = error_of(answer)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "4096" in error["message"]
        assert str(length) in error["message"]
        assert hello.call(lambda inside: hello.engine.steps) == steps, "work was done"


def test_a_prompt_over_the_context_as_chat_and_as_ids(hello: Running) -> None:
    answer = httpx.post(hello.url + CHAT, json=body("x" * 5000))
    assert error_of(answer)["code"] == "context_length_exceeded"
    assert error_of(answer)["param"] == "messages"
    answer = httpx.post(hello.url + "/v1/completions", json={"model": "bytes", "prompt": [1] * 5000})
    assert error_of(answer)["code"] == "context_length_exceeded"


def test_a_huge_prompt_is_refused_without_being_tokenized(hello: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr("tests.app.byte_model.ByteTokenizer.encode", encode)
    answer = httpx.post(hello.url + CHAT, json=body("x" * (8 * MIB)), timeout=30)
    assert error_of(answer)["code"] == "context_length_exceeded"


def test_a_body_over_the_limit_is_refused_by_its_header() -> None:
    with service(settings={"max_body_mib": 1}) as running, connect(running.url) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {2 * MIB}\r\nexpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        answers = Answers(connection)
        assert answers.head() == 413
        assert json.loads(answers.body())["error"]["code"] == "body_too_large"
        assert answers.headers["connection"] == "close"


def test_a_body_over_the_limit_is_refused_while_it_comes() -> None:
    with service(settings={"max_body_mib": 1}) as running:

        def parts() -> Any:
            for _ in range(40):
                yield b"x" * (MIB // 10)

        answer = httpx.post(running.url + CHAT, content=parts(), timeout=30)
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "body_too_large"
        answer = httpx.post(running.url + CHAT, content=b"x" * (4 * MIB), timeout=30)
        assert answer.status_code == 413
        assert running.call(lambda inside: inside.scheduler.inflight_bytes) == 0
        assert httpx.post(running.url + CHAT, json=body("x" * 3000)).status_code == 200


def test_bodies_share_one_budget_with_everything_else() -> None:
    with service(settings={"max_body_mib": 2, "max_inflight_mib": 2}) as running:
        with connect(running.url) as half, connect(running.url) as other:
            whole = b" " * (3 * MIB // 2)
            half.sendall(post(CHAT, whole)[: -MIB // 4])
            running.wait_until(lambda inside: inside.scheduler.inflight_bytes > MIB)
            other.sendall(post(CHAT, whole))
            answers = Answers(other)
            assert answers.head() == 429
            assert json.loads(answers.body())["error"]["code"] == "queue_full"
        running.wait_until(lambda inside: inside.scheduler.inflight_bytes == 0)


def test_a_full_queue() -> None:
    with service(lambda submit: itertools.repeat(65), engine=ENDLESS, settings={"max_queue": 1}) as running:
        clients = [connect(running.url) for _ in range(2)]
        for count, client in enumerate(clients, 1):
            client.sendall(post(CHAT, body(stream=True)))
            running.wait_until(lambda inside, c=count: inside.scheduler.running + inside.scheduler.waiting == c)  # type: ignore[misc]
        for path, fields in ((CHAT, body()), ("/v1/completions", {"model": "bytes", "prompt": "x"})):
            answer = httpx.post(running.url + path, json=fields)
            assert answer.status_code == 429
            assert error_of(answer)["code"] == "queue_full"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert httpx.get(running.url + "/live").status_code == 200
        for client in clients:
            client.close()


def test_while_the_engine_loads() -> None:
    with service(engine_type=NotYet, wait_ready=False) as running:
        for path in ("/ready", "/health"):
            answer = httpx.get(running.url + path)
            assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_loading")
            assert int(answer.headers["retry-after"]) >= 1
        for path in (CHAT, "/v1/completions"):
            answer = httpx.post(running.url + path, json={"not": "even looked at"})
            assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_loading")
        assert httpx.get(running.url + "/live").status_code == 200
        assert httpx.get(running.url + "/v1/models").json()["data"][0]["id"] == "bytes"


def test_while_draining() -> None:
    with service() as running:
        running.call(lambda inside: inside.scheduler.drain())
        answer = httpx.post(running.url + CHAT, json=body())
        assert (answer.status_code, error_of(answer)["code"]) == (503, "draining")
        assert answer.headers["retry-after"]
        assert httpx.get(running.url + "/ready").status_code == 503
        assert httpx.get(running.url + "/live").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 tls hello\r\n\r\n",
        b"GET / HTTP/9.9 nonsense\r\n\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: x\r\n"
        + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(70))
        + b"\r\n",
    ],
)
def test_what_is_no_http(hello: Running, sent: bytes) -> None:
    with connect(hello.url) as connection:
        connection.sendall(sent)
        answers = Answers(connection)
        assert answers.head() == 400
        assert json.loads(answers.body())["error"]["code"] == "invalid_http"
        assert answers.at_end()


def test_half_open_requests_disturb_nobody(hello: Running) -> None:
    half_open = [connect(hello.url) for _ in range(100)]
    try:
        for connection in half_open:
            connection.sendall(post(CHAT, body())[:-5])
        began = time.monotonic()
        assert httpx.post(hello.url + CHAT, json=body()).status_code == 200
        assert time.monotonic() - began < 10, "a hang, not a matter of speed"
    finally:
        for connection in half_open:
            connection.close()


def test_our_own_failure_is_a_500_that_says_nothing(hello: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError(CANARY)

    monkeypatch.setattr("app.routes.generate._choices", broken)
    answer = httpx.post(hello.url + CHAT, json=body())
    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
    monkeypatch.undo()
    assert httpx.post(hello.url + CHAT, json=body()).status_code == 200
    assert hello.call(lambda inside: inside.scheduler.inflight_bytes) == 0


@pytest.mark.parametrize(
    ("path", "start", "element"),
    [
        ("/v1/completions", b'{"model": "bytes", "prompt": [', b"1,"),
        ("/v1/completions", b'{"model": "bytes", "prompt": [', b'"",'),
        (CHAT, b'{"model": "bytes", "messages": [', b'{"role": "user", "content": ""},'),
        (CHAT, b'{"model": "bytes", "messages": [], "metadata": {', b'"k": "v",'),
    ],
)
def test_a_body_of_structure_is_refused_while_it_comes(hello: Running, path: str, start: bytes, element: bytes) -> None:
    answer = httpx.post(hello.url + path, content=start + element * 2_000_000, timeout=30)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "too_many_elements")
    assert hello.call(lambda inside: inside.scheduler.inflight_bytes) == 0
