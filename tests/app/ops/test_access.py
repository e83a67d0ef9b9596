"""Who gets in on the ops listener: with the key or a session, by its own names, from its own pages."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.errors import TooManyLogins
from app.ops.access import MOST_FAILURES, SESSION_S, WITHIN_S, Sessions
from tests.app.raw_client import Answers, connect
from tests.app.running import ADMIN_KEY, Running, service

CLIENT = httpx.Client(timeout=20)
KEY = {"authorization": f"Bearer {ADMIN_KEY}"}
READ = ("/admin/vram", "/admin/vram/history", "/admin/vram/requests", "/admin/events")
ACTS = (("POST", "/admin/trim"), ("POST", "/admin/reload"), ("POST", "/admin/drain"), ("PUT", "/admin/watchdog"))


@pytest.fixture
def fresh() -> Iterator[Running]:
    with service() as running:
        yield running


def code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"cookie": "ullage_admin_1=1.x"}])
@pytest.mark.parametrize(("method", "path"), [*(("GET", path) for path in READ), *ACTS, ("GET", "/admin/nothing")])
def test_nothing_without_the_key(hello: Running, method: str, path: str, headers: dict[str, str]) -> None:
    answer = CLIENT.request(method, hello.ops_url + path, headers=headers)
    assert (answer.status_code, code(answer)) == (401, "invalid_api_key")


@pytest.mark.parametrize("path", READ)
def test_reading_with_the_key(hello: Running, path: str) -> None:
    answer = CLIENT.get(hello.ops_url + path, headers=KEY)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/metrics"])
def test_what_holds_no_secret_takes_no_key(hello: Running, path: str) -> None:
    answer = CLIENT.get(hello.ops_url + path)
    assert answer.status_code == 200
    assert len(answer.headers.get_list("content-security-policy")) == 1


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8001", "localhost.evil.example", ""])
@pytest.mark.parametrize("path", ["/", "/metrics", "/admin/vram"])
def test_another_host_name_gets_nothing(hello: Running, host: str, path: str) -> None:
    answer = CLIENT.get(hello.ops_url + path, headers={**KEY, "host": host})
    assert (answer.status_code, code(answer)) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "query", [f"key={ADMIN_KEY}", "api_key=x", "Token=x", "access_token", f"a=1&b={ADMIN_KEY}", "authorization=Bearer"]
)
@pytest.mark.parametrize("headers", [{}, KEY])
def test_a_key_in_the_url_is_refused(hello: Running, query: str, headers: dict[str, str]) -> None:
    for path in ("/admin/vram", "/", "/metrics"):
        answer = CLIENT.get(f"{hello.ops_url}{path}?{query}", headers=headers)
        assert (answer.status_code, code(answer)) == (400, "key_in_url")
        assert ADMIN_KEY not in answer.text


def login(running: Running, key: str = ADMIN_KEY, **headers: str) -> httpx.Response:
    CLIENT.cookies.clear()
    answer = CLIENT.post(running.ops_url + "/admin/login", json={"key": key}, headers=headers)
    CLIENT.cookies.clear()
    return answer


def test_a_login_gives_a_cookie_in_place_of_the_key(hello: Running) -> None:
    answer = login(hello)
    assert (answer.status_code, answer.content) == (204, b"")
    cookie = answer.headers["set-cookie"]
    assert {part.strip() for part in cookie.split(";")[1:]} == {
        "Path=/", "HttpOnly", "SameSite=Strict", f"Max-Age={SESSION_S}"
    }  # fmt: skip
    assert ADMIN_KEY not in cookie
    with httpx.Client(base_url=hello.ops_url, cookies=answer.cookies) as page:
        assert page.get("/admin/vram").status_code == 200
        own = {"origin": hello.ops_url}
        assert page.post("/admin/trim", headers=own, json={}).status_code == 200
        assert page.post("/admin/trim", headers={"origin": hello.ops_url.replace("http", "https")}).status_code == 200
        gone = page.post("/admin/logout", headers=own)
        assert (gone.status_code, "Max-Age=0" in gone.headers["set-cookie"]) == (204, True)
        assert page.get("/admin/vram").status_code == 401


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1", "http://127.0.0.1:1"])
@pytest.mark.parametrize(("method", "path"), [*ACTS, ("POST", "/admin/logout")])
def test_a_cookie_acts_only_for_its_own_page(hello: Running, method: str, path: str, origin: str | None) -> None:
    headers = {} if origin is None else {"origin": origin}
    cookie = login(hello).headers["set-cookie"].split(";")[0]
    answer = CLIENT.request(method, hello.ops_url + path, headers={**headers, "cookie": cookie})
    assert (answer.status_code, code(answer)) == (403, "cross_origin")
    assert not hello.service.scheduler.draining
    assert len(hello.engines) == 1


def test_another_origin_is_refused_whatever_it_knows(hello: Running) -> None:
    foreign = {"origin": "http://evil.example"}
    for headers in (foreign, {**KEY, **foreign}):
        answer = CLIENT.get(hello.ops_url + "/admin/vram", headers=headers)
        assert (answer.status_code, code(answer)) == (403, "cross_origin")
        assert "access-control-allow-origin" not in answer.headers
    assert code(login(hello, origin="http://evil.example")) == "cross_origin"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"key": "wrong"}', 401),
        (b"{}", 400),
        (b'{"key": 1}', 400),
        (b'{"key": "a", "more": 1}', 400),
        (b"key=wrong", 400),
        (b"x" * (1 << 20 | 1), 413),
    ],
)
def test_a_login_that_is_none(hello: Running, body: bytes, status: int) -> None:
    answer = CLIENT.post(hello.ops_url + "/admin/login", content=body)
    assert answer.status_code == status
    assert "set-cookie" not in answer.headers


def test_guessing_is_slow(fresh: Running) -> None:
    for _ in range(MOST_FAILURES):
        assert login(fresh, "guess").status_code == 401
    answer = login(fresh)
    assert (answer.status_code, code(answer)) == (429, "too_many_logins")
    assert 50 <= int(answer.headers["retry-after"]) <= 60
    assert CLIENT.get(fresh.ops_url + "/admin/vram", headers=KEY).status_code == 200


def scope(cookie: str = "") -> dict[str, Any]:
    return {"server": ("127.0.0.1", 8001), "headers": [(b"cookie", cookie.encode())]}


def test_a_session_ends_and_cannot_be_made_up() -> None:
    now = [1000.0]
    sessions = Sessions("key", lambda: now[0])
    name, value = sessions.cookie(scope()).split(";")[0].split("=")
    assert sessions.known(scope(f"{name}={value}"))
    assert sessions.known(scope(f"other=1; {name}={value}"))
    assert Sessions("key", lambda: now[0]).known(scope(f"{name}={value}"))  # after a restart
    assert not Sessions("other key", lambda: now[0]).known(scope(f"{name}={value}"))
    end, _, signature = value.partition(".")
    for made_up in (f"{int(end) + 1}.{signature}", f"{end}.", end, "", f"{end}.{'0' * 64}", "x.y", f'"{value}'):
        assert not sessions.known(scope(f"{name}={made_up}")), made_up
    now[0] += SESSION_S
    assert not sessions.known(scope(f"{name}={value}"))


def test_failures_are_forgotten_after_a_minute() -> None:
    now = [1000.0]
    sessions = Sessions("key", lambda: now[0])
    for _ in range(MOST_FAILURES):
        sessions.may_try()
        sessions.failed()
    with pytest.raises(TooManyLogins):
        sessions.may_try()
    now[0] += WITHIN_S
    sessions.may_try()


def test_two_services_on_one_host_do_not_share_cookies() -> None:
    assert Sessions("key").cookie({**scope(), "server": ("h", 1)}) != Sessions("key").cookie(
        {**scope(), "server": ("h", 2)}
    )


def test_no_host_at_all(hello: Running) -> None:
    with connect(hello.ops_url) as connection:
        connection.sendall(b"GET /admin/vram HTTP/1.0\r\n\r\n")
        assert Answers(connection).head() == 403
