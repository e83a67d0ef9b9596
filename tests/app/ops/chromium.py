"""Headless Chromium, driven over its own pipe: no driver program and no client library.

With --remote-debugging-pipe the browser reads commands from file descriptor 3 and writes answers and events to 4, each
a JSON object that ends with a zero byte.
"""

import base64
import fcntl
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HANG_S = 30
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--remote-debugging-pipe",
)


def chromium() -> str:
    """The program; without it the test is skipped, and in CI it fails."""
    found = shutil.which("chromium")
    if found is None:
        reason = "needs Debian's package chromium"
        if os.environ.get("ULLAGE_CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


class Chromium:
    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process = process
        self._to = to
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, args=(back,), daemon=True)
        self._reader.start()

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = queue.Queue()
        command = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(command).encode() + b"\0")
        answer = self._answers[number].get(timeout=HANG_S)
        del self._answers[number]
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    @contextmanager
    def page(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator["Page"]:
        """A page in a profile of its own: no cookie of another test."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        try:
            page.prepare(width, height, dark)
            page.go(url)
            yield page
        finally:
            self.send("Target.disposeBrowserContext", browserContextId=context)

    def end(self) -> None:
        self.send("Browser.close")
        self._process.wait(HANG_S)
        self._reader.join(HANG_S)
        os.close(self._to)

    def _read(self, back: int) -> None:
        rest = b""
        while data := os.read(back, 1 << 16):
            *whole, rest = (rest + data).split(b"\0")
            for message in map(json.loads, whole):
                if "id" in message:
                    self._answers[message["id"]].put(message)
                elif message.get("sessionId") in self._pages:
                    self._pages[message["sessionId"]].heard(message["method"], message["params"])
        os.close(back)


class Page:
    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        """What the console shows: errors of scripts, refused resources, breaches of the policy."""
        self.urls: list[str] = []
        """Everything that was asked for."""

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def prepare(self, width: int, height: int, dark: bool) -> None:
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.send(f"{domain}.enable")
        self.size(width, height)
        self.look(dark)

    def look(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[scheme, still])

    def size(self, width: int, height: int) -> None:
        """Of the window, in CSS pixels; a phone under 500."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def go(self, url: str) -> None:
        self.run("window.left = true")
        self.send("Page.navigate", url=url)
        self.until("!window.left && document.readyState === 'complete'")

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Audits.issueAdded" and params["issue"]["code"] == "ContentSecurityPolicyIssue":
            self.complaints.append(json.dumps(params["issue"]))
        elif method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        done = self.send(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
            allowUnsafeEvalBlockedByCSP=False,
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true, looking after every frame."""
        looking = (
            f"new Promise((done) => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 20);"
            f" look(); setTimeout(() => done(false), {HANG_S * 500}); }})"
        )
        assert self.run(looking), f"never true: {condition}\n{self.complaints}\n{self.text()[:3000]}"

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """With a real mouse event in the middle of it, after scrolling to it."""
        quoted = json.dumps(selector)
        where = self.run(
            f"(() => {{ const it = document.querySelector({quoted}); it.scrollIntoView({{block: 'center'}});"
            " const at = it.getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def choose(self, selector: str, value: str) -> None:
        self.run(f"(document.querySelector({json.dumps(selector)}).value = {json.dumps(value)}, 0)")

    def picture(self, path: Path) -> None:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


@contextmanager
def browser() -> Iterator[Chromium]:
    """A browser of its own, ended on leaving."""
    program = chromium()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        to_read, to_write = _pipe()
        back_read, back_write = _pipe()
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCH,
                str(to_read),
                str(back_write),
                program,
                *FLAGS,
                f"--user-data-dir={profile}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_read, back_write),
        )
        os.close(to_read)
        os.close(back_write)
        running = Chromium(process, to_write, back_read)
        try:
            yield running
        finally:
            running.end()


def _pipe() -> tuple[int, int]:
    """Both ends, out of the way of 3 and 4."""
    ends = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return read, write
