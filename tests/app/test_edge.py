"""Request ids, keys and host names, on every answer and for every listener."""

import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.app.raw_client import Answers, connect
from tests.app.running import ADMIN_KEY, Running, service

CHAT = "/v1/chat/completions"
BODY = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}
PATHS = ("/live", "/ready", "/health", "/v1/models", "/nothing", CHAT)


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with service(api_keys=["key-one", "key-two"]) as running:
        yield running


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_its_own_id(hello: Running, path: str) -> None:
    ids = [httpx.get(hello.url + path).headers["x-request-id"] for _ in range(2)]
    assert all(re.fullmatch(r"[0-9a-f]{32}", request_id) for request_id in ids)
    assert ids[0] != ids[1]


@pytest.mark.parametrize("given", ["abc", "A-Z_09", "x" * 128])
@pytest.mark.parametrize("path", ["/live", "/nothing"])
def test_an_id_of_the_clients_is_kept(hello: Running, path: str, given: str) -> None:
    assert httpx.get(hello.url + path, headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a;b", "né".encode(), "<script>"])
def test_a_strange_id_is_not(hello: Running, given: str | bytes) -> None:
    answer = httpx.get(
        hello.url + "/live", headers=[(b"x-request-id", given if isinstance(given, bytes) else given.encode())]
    )
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])


def test_the_id_is_on_streams_and_in_the_record(hello: Running) -> None:
    with httpx.stream(
        "POST", hello.url + CHAT, json={**BODY, "stream": True}, headers={"x-request-id": "mine"}
    ) as answer:
        assert answer.headers["x-request-id"] == "mine"
        answer.read()


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", "Bearer key-on", "Bearer key-one2", "Basic key-one"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/bytes", CHAT, "/v1/nothing"])
def test_v1_asks_for_a_key(locked: Running, path: str, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    answer = httpx.request("POST" if path == CHAT else "GET", locked.url + path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["key-one", "key-two"])
def test_each_key_opens(locked: Running, key: str) -> None:
    client = openai.OpenAI(base_url=locked.v1, api_key=key)
    assert client.models.list().data[0].id == "bytes"
    answer = client.chat.completions.create(model="bytes", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "Hello there."


def test_the_sdk_raises_for_a_wrong_key(locked: Running) -> None:
    client = openai.OpenAI(base_url=locked.v1, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as raised:
        client.models.list()
    assert raised.value.code == "invalid_api_key"


@pytest.mark.parametrize("path", ["/live", "/ready", "/health"])
def test_probes_need_no_key(locked: Running, path: str) -> None:
    assert httpx.get(locked.url + path).status_code == 200


def test_a_wrong_key_is_told_before_the_body_is_read(locked: Running) -> None:
    with connect(locked.url) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert Answers(connection).head() == 401


def test_metrics_need_no_key_but_the_right_name(locked: Running) -> None:
    assert httpx.get(locked.ops_url + "/metrics").status_code == 200
    port = httpx.URL(locked.ops_url).port
    for host in (f"localhost:{port}", "localhost", "LOCALHOST", "127.0.0.1", f"[::1]:{port}"):
        assert httpx.get(locked.ops_url + "/metrics", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.nip.io", "", "[::2]"):
        answer = httpx.get(locked.ops_url + "/metrics", headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed"), host


def test_allowed_names_are_a_setting() -> None:
    with service(settings={"ops_allowed_hosts": ("ops.internal",)}) as running:
        assert httpx.get(running.ops_url + "/metrics", headers={"host": "ops.internal:8001"}).status_code == 200
        assert httpx.get(running.ops_url + "/metrics").status_code == 403


@pytest.mark.parametrize(("given", "status"), [("", 401), ("Bearer nope", 401), (f"Bearer {ADMIN_KEY}", 404)])
def test_admin_asks_for_the_admin_key(hello: Running, given: str, status: int) -> None:
    answer = httpx.get(hello.ops_url + "/admin/vram", headers={"authorization": given})
    assert answer.status_code == status


def test_an_api_key_is_no_admin_key(locked: Running) -> None:
    answer = httpx.get(locked.ops_url + "/admin/vram", headers={"authorization": "Bearer key-one"})
    assert answer.status_code == 401


def test_the_listeners_share_no_route(hello: Running) -> None:
    assert httpx.get(hello.ops_url + "/v1/models").status_code == 404
    assert httpx.get(hello.url + "/metrics").status_code == 404
