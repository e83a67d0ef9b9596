"""The real engine as a child process, with a tiny golden model."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.build import build_id
from engine.client import EngineLauncher, EngineProcess
from engine.config import EngineConfig
from engine.errors import HandshakeError, LoadRefused
from engine.framing import TO_SERVICE, FrameReader, encode
from engine.messages import (
    SCHEMA,
    Failed,
    Heartbeat,
    Hello,
    LoadFailed,
    LoadProgress,
    Ready,
    Sampling,
    Step,
    Submit,
    Welcome,
)
from tests.golden.cases import COMMITTED

MODEL = COMMITTED / "models/llama-Q4_1-s1/model.gguf"
ORPHAN = str(Path(__file__).with_name("orphan.py"))
GONE_S = 10.0
"""Two seconds are promised; a busy test machine gets more."""


class Listener:
    def __init__(self) -> None:
        self.phases: set[str] = set()
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str | None] = {}
        self.released: list[int] = []
        self.failed: list[Failed] = []
        self.deaths: list[str] = []
        self._news = asyncio.Event()

    def on_progress(self, progress: LoadProgress) -> None:
        self.phases.add(progress.phase)

    def on_step(self, step: Step) -> None:
        for token in step.tokens:
            self.tokens.setdefault(token.sequence, []).append(token.token)
            self.finish[token.sequence] = token.finish
        self.released += step.released
        self._news.set()

    def on_failed(self, failed: Failed) -> None:
        self.failed.append(failed)
        self._news.set()

    def on_dead(self, reason: str) -> None:
        self.deaths.append(reason)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await self._news.wait()
                self._news.clear()


def config(**settings: object) -> EngineConfig:
    return EngineConfig(**{"model_path": str(MODEL), "threads": 1, "max_batch": 4, **settings})  # type: ignore[arg-type]


@contextmanager
def launcher(**settings: object) -> Iterator[EngineLauncher]:
    made = EngineLauncher.open(config(**settings), {})
    yield made
    made.close()


def submit(sequence: int = 1, max_tokens: int = 50, **rest: object) -> Submit:
    given = {"prompt_ids": [10, 20, 30], "generated_ids": [], "sampling": Sampling(seed=5), "stop_ids": ()} | rest
    return Submit(sequence=sequence, max_tokens=max_tokens, **given)  # type: ignore[arg-type]


async def test_a_whole_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started from a folder with a foreign `engine`, beside an inheritable descriptor that is none of its business."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/__init__.py").write_text("raise SystemExit('the wrong engine')\n")
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("")
    listener = Listener()
    with launcher(max_context=200) as launch, secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        engine = launch(1, listener)
        ready = await engine.start()
        assert ready.device == "cpu"
        assert (ready.kv_dtype, ready.max_context, ready.max_batch) == ("f32", 200, 4)
        assert ready.kv_blocks == 64 * 4
        assert ready.kv_bytes > 0
        assert ready.weight_bytes > 0
        assert listener.phases == {"header", "weights", "kernels"}
        proc = Path(f"/proc/{engine.pid}")
        opened = {str(link.readlink()) for link in (proc / "fd").iterdir()}
        assert str(secret) not in opened
        assert int((proc / "oom_score_adj").read_text()) >= 500
        engine.submit(submit(1))
        engine.submit(submit(2, sampling=Sampling(seed=6)))
        engine.submit(submit(3, prompt_ids=[10**6]))
        await listener.until(lambda: {1, 2} <= set(listener.released) and bool(listener.failed))
        assert [len(listener.tokens[n]) for n in (1, 2)] == [50, 50]
        assert listener.finish == {1: "length", 2: "length"}
        assert [failed.sequence for failed in listener.failed] == [3]
        resumed = submit(4, generated_ids=listener.tokens[1][:20])
        engine.submit(resumed)
        await listener.until(lambda: 4 in listener.released)
        assert listener.tokens[4] == listener.tokens[1][20:]
        engine.submit(submit(5, max_tokens=10**6))
        await listener.until(lambda: len(listener.tokens.get(5, [])) > 3)
        await engine.stop(10)
        assert (await engine.wait()).endswith("exited with code 0")
        assert listener.deaths == []


async def test_it_beats_and_leaves_the_signals_to_its_service() -> None:
    listener = Listener()
    with launcher() as launch:
        engine = launch(1, listener)
        await engine.start()
    assert engine.pid is not None
    assert os.getpgid(engine.pid) != os.getpgid(0)
    os.kill(engine.pid, signal.SIGINT)
    os.kill(engine.pid, signal.SIGTERM)
    beats: list[Heartbeat] = []
    sequence = 0
    async with asyncio.timeout(60):
        while {beat.busy for beat in beats} != {True, False}:
            if engine.heartbeat is not None and engine.heartbeat not in beats:
                beats.append(engine.heartbeat)
            if not any(beat.busy for beat in beats):
                sequence += 1  # one may be through before the next beat
                engine.submit(submit(sequence, max_tokens=10**6))
            else:
                engine.cancel(list(range(1, sequence + 1)))
            await asyncio.sleep(0.1)
    assert beats[-1].step_seconds == 0.0
    assert listener.deaths == []
    await engine.stop(10)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"max_context": 10**6}, "ConfigError", "llama.context_length: the model was trained for"),
        ({"kv_pool_mib": 1 << 30}, "DoesNotFit", "MiB of memory are available: --kv-pool-mib"),
        ({"device": "cuda"}, "ConfigError", "--device cuda"),
    ],
)
async def test_refusals_before_anything_is_loaded(
    settings: dict[str, object], kind: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with launcher(**settings) as launch, pytest.raises(LoadRefused) as caught:
        await launch(1, Listener()).start()
    assert caught.value.kind == kind
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caplog.text == "", "one line, and no traceback beside it"


async def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(MODEL.read_bytes()[:-1000])
    with launcher(model_path=str(path)) as launch, pytest.raises(LoadRefused) as caught:
        await launch(1, Listener()).start()
    assert caught.value.kind == "ModelFileError"
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert caplog.text == ""


async def test_a_service_of_another_build(caplog: pytest.LogCaptureFixture) -> None:
    with launcher() as launch:
        old = EngineProcess(launch.config, 1, launch.model_fd, Listener(), build="f" * 16, env={})
        with pytest.raises(HandshakeError, match=f"ffffffffffffffff/.*{build_id()}/.*restart the service"):
            await old.start()


class Service:
    """A service by hand, over a raw socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(60)
        self._reader = FrameReader(TO_SERVICE, 1)
        self._messages: list[object] = []

    def greet(self, model_fd: int, **settings: object) -> None:
        self.sock.sendall(encode(1, Hello(build_id(), SCHEMA, 1, config(**settings), model_fd)))
        assert isinstance(self.next(Welcome), Welcome)

    def next(self, kind: type) -> object:
        while True:
            while self._messages:
                message = self._messages.pop(0)
                if isinstance(message, kind):
                    return message
            data = self.sock.recv(1 << 16)
            assert data, "the engine closed the connection"
            self._messages += self._reader.feed(data)

    def has_ended(self) -> bool:
        """Whether the engine's end is closed; waits for it."""
        while True:
            try:
                if not self.sock.recv(1 << 16):
                    return True
            except ConnectionResetError:
                return True


@contextmanager
def model_descriptor() -> Iterator[int]:
    fd = os.open(MODEL, os.O_RDONLY)
    yield fd
    os.close(fd)


def spawn_worker(theirs: socket.socket, model_fd: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "engine.worker", "--socket-fd", str(theirs.fileno())]
    return subprocess.Popen(command, pass_fds=[theirs.fileno(), model_fd], stderr=subprocess.PIPE)


@pytest.mark.parametrize("busy", [False, True])
def test_a_closed_connection_is_the_end_although_the_service_lives(busy: bool) -> None:
    ours, theirs = socket.socketpair()
    with model_descriptor() as model_fd, theirs:
        worker = spawn_worker(theirs, model_fd)
    service = Service(ours)
    service.greet(model_fd)
    service.next(Ready)
    if busy:
        ours.sendall(encode(1, submit(1, max_tokens=900)))
        service.next(Step)
    ours.close()
    _, errors = worker.communicate(timeout=GONE_S)
    assert worker.returncode == 1
    assert errors.decode().count("\n") == 1
    assert "service" in errors.decode()


def test_a_connection_that_closes_before_the_handshake() -> None:
    ours, theirs = socket.socketpair()
    with model_descriptor() as model_fd, theirs:
        worker = spawn_worker(theirs, model_fd)
    ours.close()
    _, errors = worker.communicate(timeout=GONE_S)
    assert (worker.returncode, errors) == (1, b"the service closed the connection before the handshake\n")


def test_a_refusal_has_its_own_exit_code() -> None:
    ours, theirs = socket.socketpair()
    with model_descriptor() as model_fd, ours:
        with theirs:
            worker = spawn_worker(theirs, model_fd)
        service = Service(ours)
        service.greet(model_fd, max_context=10**6)
        refusal = service.next(LoadFailed)
        _, errors = worker.communicate(timeout=60)
    assert isinstance(refusal, LoadFailed)
    assert refusal.kind == "ConfigError"
    assert (worker.returncode, errors) == (2, b"")


def is_alive(pid: int) -> bool:
    """A zombie that nobody reaps is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("phase", ["loading", "serving"])
def test_a_killed_service_takes_its_engine_along_although_the_connection_stays(phase: str) -> None:
    """This test holds a copy of the service's end, so there is no end of file: the kernel's signal alone must do."""
    control, far_control = socket.socketpair()
    with model_descriptor() as model_fd, control, far_control:
        parent = subprocess.Popen(
            [sys.executable, "-P", ORPHAN, str(far_control.fileno()), str(model_fd)],
            pass_fds=[far_control.fileno(), model_fd],
        )
        data, descriptors, _, _ = socket.recv_fds(control, 100, 1)
        pid = int(data)
        with socket.socket(fileno=descriptors[0]) as ours:
            service = Service(ours)
            service.greet(model_fd)
            if phase == "serving":
                service.next(Ready)
            assert is_alive(pid)
            parent.kill()
            parent.wait()
            assert service.has_ended()
            deadline = time.monotonic() + GONE_S
            while is_alive(pid):
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_an_engine_whose_parent_is_not_the_service_does_not_begin() -> None:
    """As when the service died between the spawn and the request for the parent-death signal."""
    control, far_control = socket.socketpair()
    ours, theirs = socket.socketpair()
    with model_descriptor() as model_fd, control, far_control, ours:
        parent = subprocess.Popen(
            [sys.executable, "-P", ORPHAN, str(far_control.fileno()), str(model_fd), str(theirs.fileno())],
            pass_fds=[far_control.fileno(), model_fd, theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        theirs.close()
        _, errors = parent.communicate(timeout=60)
        assert parent.returncode == 1
        assert errors == b"the service ended before its engine had begun\n"
