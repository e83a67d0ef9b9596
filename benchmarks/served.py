"""`ullage serve` as a process of its own, and its clients: what demonstrations, figures and tests of reloads share.

Only the standard library, and blocking: a client is a thread, so that a slow one is slow as one outside would be.
"""

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 110.0
"""A hang guard; also long enough to compile kernels that no warm cache has."""


@dataclass
class Answer:
    """One answer to a chat request; of a stream also when each of its events came, by the monotonic clock."""

    status: int = 0
    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    completion_tokens: int | None = None
    ends: int = 0
    """How often the stream said that it is over."""
    arrivals: list[float] = field(default_factory=list)

    @property
    def longest_pause_s(self) -> float:
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)

    @property
    def whole(self) -> bool:
        """It came to its end, once, without an error."""
        return (self.status, self.error, self.ends) == (200, None, 1) and self.finish is not None

    def take(self, line: bytes) -> None:
        """One line of a stream."""
        if not line.startswith(b"data: "):
            return
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            self.ends += 1
            return
        event = json.loads(data)
        self.error = event.get("error", self.error)
        self._usage(event)
        for choice in event.get("choices", []):
            content = choice["delta"].get("content")
            if content:
                self.text += content
                self.arrivals.append(time.monotonic())
            self.finish = choice["finish_reason"] or self.finish

    def plain(self, body: bytes) -> None:
        """The whole of an answer that is no stream."""
        answer = json.loads(body)
        self.error = answer.get("error")
        self._usage(answer)
        for choice in answer.get("choices", []):
            self.text, self.finish, self.ends = choice["message"]["content"], choice["finish_reason"], 1

    def _usage(self, answer: dict[str, Any]) -> None:
        usage = answer.get("usage")
        if usage:
            self.completion_tokens = usage["completion_tokens"]


class Served:
    """A running service."""

    def __init__(self, process: subprocess.Popen[str], state: Path, banner: str) -> None:
        self.process = process
        self.banner = banner
        self.cards = state / "simulated-gpus"
        [public] = re.findall(r"^  public +(\S+)/v1", banner, re.MULTILINE)
        [self.ops] = re.findall(r"^  ops +(\S+)/metrics", banner, re.MULTILINE)
        [self.model] = re.findall(r"^  model +(\S+)", banner, re.MULTILINE)
        self._public = _address(public)
        self._admin = {"authorization": f"Bearer {(state / 'admin.key').read_text().strip()}"}

    # Clients.

    def chat(
        self,
        prompt: str,
        answer: Answer | None = None,
        enough: Callable[[Answer], bool] = lambda answer: False,
        **body: Any,
    ) -> Answer:
        """Ask and read to the end, or until it is enough and the client goes.

        `answer` is filled while it comes, for whoever looks on.
        """
        answer = answer or Answer()
        whole = {"model": self.model, "messages": [{"role": "user", "content": prompt}], **body}
        connection = http.client.HTTPConnection(*self._public, timeout=PATIENCE_S)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(whole))
            response = connection.getresponse()
            answer.status = response.status
            if response.status == 200 and body.get("stream"):
                for line in response:
                    answer.take(line)
                    if enough(answer):
                        break
            else:
                answer.plain(response.read())
        finally:
            connection.close()
        return answer

    # Whoever operates it.

    def vram(self) -> dict[str, Any]:
        return dict(self._ops("GET", "/admin/vram"))

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        return list(self._ops("GET", f"/admin/events?after={after}")["events"])

    def trim(self, rung: str | None = None, device: int | None = None) -> list[dict[str, Any]]:
        return list(self._ops("POST", "/admin/trim", {"rung": rung, "device": device})["results"])

    def reload(self) -> dict[str, Any]:
        return dict(self._ops("POST", "/admin/reload"))

    def metrics(self) -> str:
        return str(self._ops("GET", "/metrics"))

    def _ops(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection(*_address(self.ops), timeout=PATIENCE_S)
        headers = {**self._admin, "content-type": "application/json"}
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            content = response.read().decode()
        finally:
            connection.close()
        if response.status not in (200, 202):
            raise RuntimeError(f"{method} {path}: {response.status} {content}")
        return json.loads(content) if response.headers.get_content_type() == "application/json" else content

    # Processes.

    def engines(self) -> list[int]:
        """Process ids of the service's engines: the one that serves first, then one that is being prepared."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"engine.worker" in _command_line(int(pid))]


@contextmanager
def serving(state: Path, *arguments: str) -> Iterator[Served]:
    """A service that is ready, on free ports; ended on leaving if it has not been."""
    command = [sys.executable, "-P", "-m", "app", "serve", "--port", "0", "--ops-port", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ULLAGE_")}
    log = state.with_suffix(".log")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*command, "--state-dir", str(state), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Served(process, state, _banner(process, log))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(PATIENCE_S)


def _banner(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("  admin key"):
            return "".join(lines)
    raise RuntimeError(f"it ended with {process.wait()}:\n" + "".join(lines) + log.read_text())


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
