"""The status page of a real service with two simulated cards, in a browser, from the key to a reload."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.ops.chromium import Chromium, Page
from tests.app.ops.scripted_admin import device, event, request_row, vram
from tests.app.ops.signed_in import OPENED, answer, asked_by, outcome, sign_in
from tests.app.process import TINY, Served, serving

CARDS = ("--model", str(TINY), "--simulate-gpus", "2x16GiB", "--faults", "leak=6MiB/request@1")


class Whole:
    """The service as an operator has it."""

    def __init__(self, served: Served, key: str) -> None:
        self.served = served
        self.key = key
        self.ops = served.metrics.removesuffix("/metrics")

    def get(self, path: str) -> Any:
        return httpx.get(self.ops + path, headers={"authorization": f"Bearer {self.key}"}).raise_for_status().json()

    def complete(self) -> None:
        body = {"model": self.served.model, "prompt": "one two three", "max_tokens": 4}
        httpx.post(f"{self.served.v1}/completions", json=body, timeout=60).raise_for_status()

    def open(self, page: Page) -> None:
        sign_in(page, self.key)
        page.until(OPENED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    state: Path = tmp_path_factory.mktemp("state")
    with serving(*CARDS, state=state) as served:
        yield Whole(served, (state / "admin.key").read_text().strip())


def shape(value: Any) -> Any:
    """The names in it, all the way down."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    return [shape(inner) for inner in value[:1] if isinstance(inner, dict)] if isinstance(value, list) else None


def test_the_scripted_shapes_are_the_real_ones(whole: Whole) -> None:
    """So what the other tests show to the page is what it will be shown."""
    whole.complete()
    real, scripted = whole.get("/admin/vram"), vram(device(0))
    real["reload"]["last"] = scripted["reload"]["last"] = None
    assert shape(real) == shape(scripted)
    [row] = whole.get("/admin/vram/requests?limit=1")["requests"]
    scripted_row = request_row(1, [1], [None])
    row["devices"][0]["change_by_owner"] = None
    assert shape(row) == shape(scripted_row)
    columns = {"device", "time", "free", "idle_free", "warn", "trim", "reload"}
    assert set(whole.get("/admin/vram/history")["devices"][0]) == columns
    assert {frozenset(happened) for happened in whole.get("/admin/events")["events"]} == {frozenset(event(1))}


def test_figures_and_acts(whole: Whole, chrome: Chromium) -> None:
    with chrome.page(whole.ops) as page:
        whole.open(page)
        assert "simulated 16384 MiB · stage 1" in page.text("#device-1")
        assert "total\t16,384 MiB\t100 %" in page.text("#device-0")
        before = page.run("document.querySelectorAll('#requests tbody tr').length")
        for _ in range(3):
            whole.complete()
        page.run("(requestsAt = 0, refresh())")
        page.until(f"document.querySelectorAll('#requests tbody tr').length === {before + 3}")
        asked_by(page, "#trim button")
        answer(page, yes=True)
        assert "elastic on device 1: " in outcome(page)
        page.until("document.querySelector('#events').innerText.includes('as an operator asked')")
        page.choose("#mode-name", "dry-run")
        page.choose("#mode-for", "900")
        asked_by(page, "#mode button")
        answer(page, yes=True)
        page.until("document.querySelector('[data-is=mode]').innerText === 'dry-run'")
        assert whole.get("/admin/vram")["watchdog"]["until"] is not None
        assert page.complaints == []


def test_a_reload_and_the_end_of_the_session(whole: Whole, chrome: Chromium) -> None:
    generation = whole.get("/admin/vram")["reload"]["generation"]
    with chrome.page(whole.ops) as page:
        whole.open(page)
        asked_by(page, "#reload button")
        answer(page, yes=True)
        page.until(f"document.querySelector('[data-is=engine-sub]').innerText === 'generation {generation + 1}'")
        page.until("document.querySelector('#last-reload').innerText.includes('operator, ok')")
        whole.complete()
        assert page.text("[data-is=lost]") == "0"
        assert page.complaints == []
        assert not [url for url in page.urls if whole.key in url or not url.startswith(whole.ops)]
        page.click("#logout")
        page.until("!document.querySelector('#login').hidden")
        assert page.run("fetch('/admin/vram').then((answer) => answer.status)") == 401


ATTACK = """
(async () => {
  const seen = [];
  const ask = (path, options) => fetch(TARGET + path, { credentials: 'include', ...options })
    .then((answer) => seen.push(`${path} read ${answer.status}`), () => seen.push(`${path} refused`));
  await ask('/admin/vram');
  await ask('/admin/events');
  await ask('/page/page.js');
  await ask('/admin/reload', { method: 'POST', mode: 'no-cors' });
  await ask('/admin/reload', { method: 'POST', headers: { 'content-type': 'application/json' }, body: '{}' });
  await ask('/admin/watchdog', { method: 'PUT', body: '{"mode": "off"}' });
  const frame = document.createElement('iframe');
  frame.src = TARGET;
  await new Promise((done) => { frame.onload = done; document.body.append(frame); });
  try { seen.push(frames[0].document.title); } catch (error) { seen.push(`frame refused: ${error.name}`); }
  return seen;
})()
"""


class Elsewhere(BaseHTTPRequestHandler):
    """A page of another port of this host: the same site to a cookie, another origin to a browser."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><link rel=icon href=data:,><title>elsewhere</title>")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def elsewhere() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Elsewhere)
    thread = threading.Thread(target=server.serve_forever, name="elsewhere")
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_page_of_another_origin_gets_nothing_and_moves_nothing(
    whole: Whole, chrome: Chromium, elsewhere: str
) -> None:
    """Even with a session in the same browser, and from the same host, where the cookie is sent along."""
    before = whole.get("/admin/vram")
    with chrome.page(whole.ops) as page:
        whole.open(page)
        page.go(elsewhere)
        seen = page.run(ATTACK.replace("TARGET", repr(whole.ops)))
        assert len(seen) == 7
        assert [line for line in seen if "refused" not in line] == []
        assert any("frame-ancestors" in complaint for complaint in page.complaints)
    after = whole.get("/admin/vram")
    assert after["reload"] == before["reload"]
    assert after["watchdog"] == before["watchdog"]
