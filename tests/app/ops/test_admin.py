"""What an operator asks for: answers, statuses, and bad input refused with what there is instead."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from app.edge import handlers_of
from app.events import Kind
from app.factory import OPS
from engine.fake import FakeEngine
from tests.app.cards import KEY, on_cards
from tests.app.raw_client import Answers, connect
from tests.app.running import Running, service

CLIENT = httpx.Client(timeout=20)


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with on_cards(tmp_path_factory.mktemp("cards")) as (running, _):
        yield running


def ask(running: Running, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    return CLIENT.request(method, running.ops_url + path, content=content, headers={**KEY, **headers})


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"rung": "everything"}, "rung", "pools, stack_limit, cublas_workspace, graph_cache, elastic"),
        ({"rung": "reload"}, "rung", "pools, stack_limit, cublas_workspace, graph_cache, elastic"),
        ({"rung": "pools", "device": 2}, "device", "there are 0, 1"),
        ({"device": -1}, "device", "there are 0, 1"),
        ({"device": "0"}, "device", "expected int"),
        ({"device": True}, "device", "expected int"),
        ({"rung": 3}, "rung", "expected str"),
        ({"rungs": "pools"}, "rungs", "not supported"),
        ([], None, "expected object"),
        (b"{", None, "not valid JSON"),
    ],
)
def test_a_trim_of_what_there_is_not(cards: Running, body: Any, param: str | None, message: str) -> None:
    answer = ask(cards, "POST", "/admin/trim", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message.lower() in error["message"].lower()
    assert cards.engine.trims == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Missing required parameter: mode"),
        ({"mode": "maybe"}, "mode: Invalid value"),
        ({"mode": "on", "until": "tomorrow"}, "until: expected a time"),
        ({"mode": "on", "until": "2099-01-01T00:00:00"}, "until: expected a time"),
        ({"mode": "on", "until": "2020-01-01T00:00:00Z"}, "until: that time has passed"),
        ({"mode": "on", "for": 3}, "for is not supported"),
    ],
)
def test_a_mode_that_makes_no_sense(cards: Running, body: Any, message: str) -> None:
    answer = ask(cards, "PUT", "/admin/watchdog", body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert cards.service.pressure.mode == "on"


@pytest.mark.parametrize("query", ["format=xml", "limit=0", "limit=-1", "limit=many", "limit=1001"])
def test_a_query_that_makes_no_sense(cards: Running, query: str) -> None:
    assert ask(cards, "GET", f"/admin/vram/requests?{query}").status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "allow"), [("GET", "/admin/trim", "POST"), ("POST", "/admin/watchdog", "PUT")]
)
def test_another_method(cards: Running, method: str, path: str, allow: str) -> None:
    answer = ask(cards, method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert ask(cards, "GET", "/admin/nothing").status_code == 404


def test_the_shape_of_vram(cards: Running) -> None:
    shown = ask(cards, "GET", "/admin/vram").json()
    assert set(shown) == {"devices", "engine", "reload", "watchdog", "queue", "model", "version"}
    assert set(shown["reload"]) == {
        "in_progress", "phase", "generation", "reason", "started_at", "last", "budget_left"
    }  # fmt: skip
    for device in shown["devices"]:
        assert {
            "device", "uuid", "name", "stages", "total", "free", "used", "reserved", "own", "other", "idle_free",
            "baseline_free", "floors", "ledger", "state", "tight", "trend",
        } <= set(device)  # fmt: skip
        assert set(device["floors"]) == {"warn", "trim", "reload"}
        assert set(device["trend"]) >= {
            "class", "bytes_per_request", "bytes_per_second", "confidence", "forecast_seconds", "forecast_requests"
        }  # fmt: skip
        assert sum(device["ledger"].values()) == device["own"]
        assert device["total"] == device["used"] + device["free"] + device["reserved"]
    assert shown["queue"] == {"running": 0, "waiting": 0, "held": 0, "lost": 0}
    assert len(ask(cards, "GET", "/admin/vram/history").json()["devices"]) == 2


class Slow(FakeEngine):
    """A successor that takes its time."""

    async def prepare(self) -> None:
        await super().prepare()
        if self.generation > 1:
            await asyncio.sleep(0.3)


def test_a_reload_during_one_is_told_how_far_it_is() -> None:
    with service(engine_type=Slow) as running:
        first = ask(running, "POST", "/admin/reload")
        assert (first.status_code, first.json()) == (202, {"id": "reload-1", "generation": 2, "phase": "prepare"})
        second = ask(running, "POST", "/admin/reload", {})
        assert (second.status_code, second.json()) == (409, first.json())
        shown = ask(running, "GET", "/admin/vram").json()["reload"]
        assert (shown["in_progress"], shown["phase"], shown["reason"]) == (True, "prepare", "operator")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", shown["started_at"])
        running.wait_until(lambda inside: not inside.supervisor.reloading)
        last = ask(running, "GET", "/admin/vram").json()["reload"]
        assert (last["in_progress"], last["generation"], last["last"]["result"]) == (False, 2, "ok")
        assert ask(running, "POST", "/admin/reload", {"reason": "vram_floor"}).status_code == 400
        told = ask(running, "GET", "/admin/events").json()["events"]
        assert [event["reason"] for event in told if event["kind"] == "reload"] == [
            "begins: operator",
            "is over: ok (operator)",
        ]


def test_after_a_drain_nothing_new_is_taken() -> None:
    with service() as running:
        answer = ask(running, "POST", "/admin/drain")
        assert (answer.status_code, answer.json()) == (202, {"draining": True, "running": 0})
        assert ask(running, "POST", "/admin/drain").status_code == 202
        refused = CLIENT.get(running.url + "/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert CLIENT.get(running.url + "/live").status_code == 200
        told = [event["kind"] for event in ask(running, "GET", "/admin/events").json()["events"]]
        assert told == ["service", "service"]


class Stream:
    """The event stream on a socket of its own."""

    def __init__(self, running: Running, *headers: str) -> None:
        self.socket = connect(running.ops_url)
        lines = ["GET /admin/events HTTP/1.1", "host: localhost", f"authorization: {KEY['authorization']}"]
        lines += ["accept: text/event-stream", *headers]
        self.socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        self.answers = Answers(self.socket)
        assert self.answers.head() == 200
        assert self.answers.headers["content-type"].startswith("text/event-stream")
        self._chunks = self.answers.chunks()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def events(self, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while len(found) < count:
            for block in next(self._chunks).decode().split("\n\n"):
                if block.startswith("id: "):
                    number, data = block.split("\n")
                    found.append(json.loads(data.removeprefix("data: ")))
                    assert number == f"id: {found[-1]['seq']}"
        return found

    def rest(self) -> bytes:
        return b"".join(self._chunks)


def test_the_stream_tells_what_happens_from_now_on(cards: Running) -> None:
    last = cards.service.events.last_seq
    with Stream(cards) as stream, Stream(cards, f"last-event-id: {last - 1}") as resumed:
        ask(cards, "PUT", "/admin/watchdog", {"mode": "dry-run"})
        ask(cards, "PUT", "/admin/watchdog", {"mode": "on"})
        assert [event["seq"] for event in resumed.events(3)] == [last, last + 1, last + 2]
        happened = stream.events(2)
        assert [event["reason"] for event in happened] == [
            "set to dry-run by an operator",
            "set to on by an operator",
        ]
        listed = ask(cards, "GET", f"/admin/events?after={last}").json()["events"]
        assert listed[:2] == happened
    assert ask(cards, "GET", "/admin/events?after=x").status_code == 400


def test_a_stream_ends_with_the_service_and_leaves_nothing_when_its_client_goes() -> None:
    with service() as running:
        with Stream(running):
            running.wait_until(lambda inside: streams() == 1)
        running.wait_until(lambda inside: streams() == 0)
        stream = Stream(running)
    assert stream.rest().count(b"data:") == 0
    stream.socket.close()


def streams() -> int:
    return sum(task.get_name() == "event stream" for task in asyncio.all_tasks())


def test_the_page_of_the_listener_names_every_route_and_kind() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "admin.md").read_text(encoding="utf-8")
    for path, method in handlers_of(OPS):
        if path.startswith("/admin"):
            assert f"{method} {path}`" in page
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(get_args(Kind))
