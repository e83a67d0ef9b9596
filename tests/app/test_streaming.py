"""Answers byte by byte, through raw sockets."""

import asyncio
import itertools
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.service import Service
from app.streaming import COMMENT
from tests.app.raw_client import Answers, connect, events, post
from tests.app.running import Running, says, service

CHAT = "/v1/chat/completions"
ENDLESS = itertools.repeat(ord("x"))


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], **fields}


def idle(inside: Service) -> bool:
    scheduler = inside.scheduler
    return scheduler.running == scheduler.waiting == scheduler.held == scheduler.inflight_bytes == 0


def everything(connection: socket.socket) -> bytes:
    """What comes until the connection ends, however it does."""
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        return received
    return received


@pytest.fixture
def endless() -> Iterator[Running]:
    """A service whose answers never end by themselves, at a thousand tokens a second."""
    with service(lambda submit: ENDLESS, engine={"step_s": 0.001, "max_batch": 2, "max_context": 1 << 30}) as running:
        yield running


def test_headers_and_keep_alive_after_a_stream(hello: Running) -> None:
    with connect(hello.url) as connection:
        answers = Answers(connection)
        for _ in range(2):
            connection.sendall(post(CHAT, body(stream=True)))
            assert answers.head() == 200
            assert answers.headers["content-type"].startswith("text/event-stream")
            assert answers.headers["cache-control"] == "no-cache"
            assert answers.headers["x-accel-buffering"] == "no"
            assert answers.headers["x-request-id"]
            assert "connection" not in answers.headers
            assert events(answers.body())[-1] == "[DONE]"
        connection.sendall(post(CHAT, body()))
        assert answers.head() == 200
        assert b"Hello there." in answers.body()


def test_pipelined_requests_are_answered_in_order(hello: Running) -> None:
    with connect(hello.url) as connection:
        connection.sendall(post(CHAT, body(stream=True)) + post(CHAT, body(max_tokens=3)))
        answers = Answers(connection)
        assert answers.head() == 200
        assert events(answers.body())[-1] == "[DONE]"
        assert answers.head() == 200
        assert b'"content":"Hel"' in answers.body()


def test_the_joined_stream_is_the_plain_answer() -> None:
    text = 'quotes " and \\ and \n and \x00 and é 漢 🎉 \ufffd end'
    with service(says(text)) as running, connect(running.url) as connection:
        connection.sendall(post(CHAT, body(stream=True)) + post(CHAT, body()))
        answers = Answers(connection)
        answers.head()
        *chunks, done = events(answers.body())
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
        answers.head()
        assert events(b"data: " + answers.body())[0]["choices"][0]["message"]["content"] == text


def test_the_first_chunk_comes_before_the_first_token() -> None:
    with service(engine={"step_s": 60.0}) as running, connect(running.url) as connection:
        connection.sendall(post(CHAT, body(stream=True)))
        answers = Answers(connection)
        assert answers.head() == 200
        [first] = events(next(answers.chunks()))
        assert first["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("keepalive", "sent"), [("comment", COMMENT), ("chunk", b'data: {"id":"chatcmpl-'), ("off", None)]
)
def test_a_silent_stream_says_that_it_lives(keepalive: str, sent: bytes | None) -> None:
    settings = {"sse_keepalive": keepalive}
    with (
        service(engine={"step_s": 0.4}, settings=settings, keepalive_s=0.05) as running,
        connect(running.url) as connection,
    ):
        connection.sendall(post(CHAT, body(stream=True, max_tokens=1)))
        answers = Answers(connection)
        answers.head()
        _role, *chunks = answers.chunks()
        silences = [chunk for chunk in chunks if b'"content":"H"' not in chunk and b"[DONE]" not in chunk]
        if sent is None:
            assert silences == []
        else:
            assert len(silences) >= 3
            assert all(chunk.startswith(sent) for chunk in silences)
        found = events(b"".join(chunks))
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found[:-1]) == "H"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled_at_once(endless: Running, stream: bool) -> None:
    connection = connect(endless.url)
    connection.sendall(post(CHAT, body(stream=stream)))
    endless.wait_until(lambda inside: inside.scheduler.running == 1)
    steps = endless.call(lambda inside: endless.engine.steps)
    connection.close()
    endless.wait_until(lambda inside: not endless.engine.sequences)
    assert endless.call(idle)
    assert endless.call(lambda inside: endless.engine.blocks_used) == 0
    assert endless.call(lambda inside: endless.engine.steps) - steps < 200


def test_blocks_are_free_two_steps_after_the_client_has_gone(endless: Running) -> None:
    """Counted from the moment at which the service knows: what the network takes is not ours."""
    cancelled_at: list[int] = []
    released_at: list[int] = []

    def watch(inside: Service) -> None:
        engine, scheduler = endless.engine, inside.scheduler
        cancel, on_step = engine.cancel, scheduler.on_step

        def noting_cancel(sequences: list[int]) -> None:
            cancelled_at.append(engine.steps)
            cancel(sequences)

        def noting_step(step: Any) -> None:
            if step.released:
                assert step.stats.kv_blocks_used == 0
                released_at.append(step.step)
            on_step(step)

        engine.cancel = noting_cancel  # type: ignore[method-assign]
        scheduler.on_step = noting_step  # type: ignore[method-assign]

    endless.call(watch)
    connection = connect(endless.url)
    connection.sendall(post(CHAT, body(stream=True)))
    endless.wait_until(lambda inside: endless.engine.blocks_used > 0)
    connection.close()
    endless.wait_until(lambda inside: bool(released_at))
    assert len(cancelled_at) == 1
    assert released_at[0] - cancelled_at[0] <= 2


def test_a_queued_request_whose_client_leaves_never_runs(endless: Running) -> None:
    running = [connect(endless.url) for _ in range(2)]
    for connection in running:
        connection.sendall(post(CHAT, body(stream=True)))
    endless.wait_until(lambda inside: inside.scheduler.running == 2)
    queued = connect(endless.url)
    queued.sendall(post(CHAT, body(stream=True)))
    endless.wait_until(lambda inside: inside.scheduler.waiting == 1)
    queued.close()
    endless.wait_until(lambda inside: inside.scheduler.waiting == 0)
    assert endless.call(lambda inside: inside.scheduler.running) == 2
    for connection in running:
        connection.close()
    endless.wait_until(idle)


def test_a_reset_connection_is_a_client_that_left(endless: Running) -> None:
    connection = connect(endless.url)
    connection.sendall(post(CHAT, body(stream=True)))
    endless.wait_until(lambda inside: inside.scheduler.running == 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    endless.wait_until(idle)


def test_a_reader_that_does_not_read_delays_nobody() -> None:
    with service(lambda submit: ENDLESS, engine={"max_context": 1 << 30}) as running:
        slow = connect(running.url)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(post(CHAT, body(stream=True, max_tokens=300_000)))
        running.wait_until(lambda inside: inside.scheduler.running == 1)
        for _ in range(3):
            answer = httpx.post(running.url + CHAT, json=body(max_tokens=50), timeout=10)
            assert answer.json()["choices"][0]["message"]["content"] == "x" * 50
        slow.close()
        running.wait_until(idle)


def test_an_error_after_the_first_byte_is_an_event_and_the_end(endless: Running) -> None:
    with connect(endless.url) as connection:
        connection.sendall(post(CHAT, body(stream=True)))
        endless.wait_until(lambda inside: inside.scheduler.running == 1)
        endless.call(lambda inside: endless.engine.fail(1, "poison"))
        answers = Answers(connection)
        assert answers.head() == 200
        found = events(answers.body())
        assert found[-1]["error"]["code"] == "poison"
        assert found[-1]["error"]["type"] == "server_error"
        assert "[DONE]" not in found


def test_an_error_before_the_first_byte_is_a_status(endless: Running) -> None:
    endless.call(lambda inside: endless.engine.refuse_next("poison"))
    answer = httpx.post(endless.url + CHAT, json=body())
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "poison"


def test_a_reader_that_does_not_read_is_cut_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.streaming.LAST_WORD_S", 0.1)
    verbose = {"stream": True, "max_tokens": 10_000_000, "logprobs": True, "top_logprobs": 20}
    engine = {"max_context": 1 << 30}
    with service(lambda submit: ENDLESS, engine=engine, settings={"request_timeout": 1.5}) as running:
        tasks = running.call(lambda inside: len(asyncio.all_tasks()))
        with connect(running.url) as slow:
            slow.sendall(post(CHAT, body(**verbose)))
            running.wait_until(lambda inside: inside.scheduler.inflight_bytes > 1 << 20)  # sockets take no more
            running.wait_until(lambda inside: len(asyncio.all_tasks()) == tasks)
            assert not everything(slow).endswith(b"0\r\n\r\n")
            assert running.call(idle)


@pytest.mark.parametrize("stream", [True, False])
def test_the_time_of_a_request_is_limited(stream: bool) -> None:
    engine = {"step_s": 0.001, "max_context": 1 << 30}
    with service(lambda submit: ENDLESS, engine=engine, settings={"request_timeout": 0.2}) as running:
        answer = httpx.post(running.url + CHAT, json=body(stream=stream))
        if stream:
            assert answer.status_code == 200
            assert events(answer.content)[-1]["error"]["code"] == "request_timeout"
        else:
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "request_timeout"
        running.wait_until(lambda inside: not running.engine.sequences)


def test_the_engine_may_die_and_the_stream_goes_on() -> None:
    text = "".join(f"{number} " for number in range(200))
    with service(says(text), engine={"step_s": 0.001}) as running, connect(running.url) as connection:
        connection.sendall(post(CHAT, body(stream=True)))
        for _ in range(3):
            engine = running.engine
            running.wait_until(lambda inside, engine=engine: engine.steps > 20)  # type: ignore[misc]
            running.call(lambda inside: running.engine.die())
            running.wait_until(lambda inside: inside.supervisor.phase == "ready")
        answers = Answers(connection)
        answers.head()
        *chunks, done = events(answers.body())
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
        assert len(running.engines) == 4


def test_stopping_the_service_ends_streams_with_an_error() -> None:
    with service(lambda submit: ENDLESS, engine={"step_s": 0.001, "max_context": 1 << 30}) as running:
        connection = connect(running.url)
        connection.sendall(post(CHAT, body(stream=True)))
        running.wait_until(lambda inside: inside.scheduler.running == 1)
        began = time.monotonic()
    assert time.monotonic() - began < 10, "a hang, not a matter of speed"
    answers = Answers(connection)
    assert answers.head() == 200
    assert events(answers.body())[-1]["error"]["code"] == "shut_down"
    assert answers.at_end()
    connection.close()
