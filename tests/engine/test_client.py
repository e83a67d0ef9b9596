"""The client against a child that speaks its protocol well or badly; the real engine is in test_worker.py."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvloop

from engine import client
from engine.build import build_id
from engine.client import LINE_BYTES, EngineLauncher, EngineProcess
from engine.config import EngineConfig
from engine.errors import EngineDied, HandshakeError, LoadRefused, ModelFileError
from engine.messages import Failed, LoadProgress, Ready, Sampling, Step, Submit

CHILD = str(Path(__file__).with_name("child.py"))


class Listener:
    """Keeps what an engine says."""

    def __init__(self) -> None:
        self.progress: list[LoadProgress] = []
        self.tokens: list[int] = []
        self.released: list[int] = []
        self.deaths: list[str] = []
        self.news = asyncio.Event()

    def on_progress(self, progress: LoadProgress) -> None:
        self.progress.append(progress)
        self.news.set()

    def on_step(self, step: Step) -> None:
        self.tokens += [token.token for token in step.tokens]
        self.released += step.released
        self.news.set()

    def on_failed(self, failed: Failed) -> None:
        raise AssertionError(failed)

    def on_dead(self, reason: str) -> None:
        self.deaths.append(reason)
        self.news.set()

    async def until_dead(self) -> str:
        while not self.deaths:
            await self.news.wait()
            self.news.clear()
        return self.deaths[0]

    async def until_released(self) -> None:
        while not self.released:
            await self.news.wait()
            self.news.clear()


@pytest.fixture
def model(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "model").write_text("the model")
    fd = os.open(tmp_path / "model", os.O_RDONLY)
    yield fd
    os.close(fd)


def children() -> set[str]:
    """Process ids of running ones and zombies."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@pytest.fixture(scope="module")
def libuv() -> None:
    """libuv opens a pipe for its signals at its first loop and keeps it."""
    uvloop.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
async def nothing_left(libuv: None) -> AsyncIterator[None]:
    """Whatever happened: no descriptor, no child and no zombie is left."""
    fds_before, children_before = set(os.listdir("/proc/self/fd")), children()
    yield
    await asyncio.sleep(0)
    assert set(os.listdir("/proc/self/fd")) == fds_before
    assert children() <= children_before


def engine(mode: str, listener: Listener, model: int, generation: int = 1) -> EngineProcess:
    return EngineProcess(
        EngineConfig(model_path="/some/model.gguf"),
        generation,
        model,
        listener,
        build=build_id(),
        env={"ADDED": "to the environment"},
        command=(CHILD, mode),
    )


def submit(sequence: int = 1, max_tokens: int = 1000, generated: int = 0) -> Submit:
    return Submit(sequence, [1], list(range(generated)), Sampling(), max_tokens, ())


async def test_a_whole_life(model: int) -> None:
    listener = Listener()
    child = engine("fd", listener, model)
    ready = await child.start()
    assert isinstance(ready, Ready)
    assert (ready.device, ready.max_batch) == ("test", 8)
    assert listener.progress == [
        LoadProgress("weights", 1, 2),
        LoadProgress("the modelto the environment", 2, 2),
    ]
    child.submit(submit(1, max_tokens=25, generated=3))
    await listener.until_released()
    assert listener.tokens == list(range(3, 25))
    assert child.heartbeat is not None
    child.submit(submit(2))
    child.cancel([2])
    listener.released.clear()
    await listener.until_released()
    assert listener.released == [2]
    await child.stop(5)
    assert "exited with code 0" in await child.wait()
    assert listener.deaths == []


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("torn", "exited with code 3"),
        ("segfault", "was killed by signal 11 (Segmentation fault)"),
        ("crash", "exited with code 1: RuntimeError: the child was told to crash"),
        ("garbage", "does not parse"),
        ("huge", "over the limit"),
        ("hangup", "was killed by signal 9"),
    ],
)
async def test_a_death_is_told_once_and_in_words(mode: str, words: str, model: int) -> None:
    """Ten steps are whole, and no more; half a frame, or a broken one, is never a token."""
    listener = Listener()
    child = engine(mode, listener, model)
    await child.start()
    child.submit(submit())
    assert words in await listener.until_dead()
    assert listener.tokens == list(range(len(listener.tokens)))
    assert 9 <= len(listener.tokens) <= 10
    child.submit(submit(2))
    child.cancel([1])
    child.kill()
    await child.stop(1)
    assert len(listener.deaths) == 1
    assert await child.wait() == listener.deaths[0]


async def test_killed_from_outside(model: int) -> None:
    listener = Listener()
    child = engine("good", listener, model)
    await child.start()
    child.submit(submit())
    await listener.news.wait()
    assert child.pid is not None
    os.kill(child.pid, 9)
    assert "was killed by signal 9 (Killed)" in await listener.until_dead()


async def test_kill_is_a_death(model: int) -> None:
    listener = Listener()
    child = engine("good", listener, model)
    await child.start()
    child.kill()
    assert "signal 9" in await listener.until_dead()


async def test_frames_of_another_generation_are_dropped(model: int) -> None:
    listener = Listener()
    child = engine("foreign", listener, model)
    await child.start()
    child.submit(submit(max_tokens=30))
    await listener.until_released()
    assert listener.tokens == list(range(30))
    await child.stop(5)


async def test_a_head_start(model: int) -> None:
    """The child runs before anybody waits for it; whoever listens then hears of everything from then on."""
    child = engine("good", Listener(), model)
    await child.spawn()
    listener = Listener()
    child.listen(listener)
    await child.start()
    child.submit(submit(max_tokens=5))
    await listener.until_released()
    assert listener.tokens == list(range(5))
    await child.stop(5)


@pytest.mark.parametrize("mode", ["good", "slow-load", "stillborn"])
async def test_a_head_start_that_nobody_takes_up(mode: str, model: int) -> None:
    child = engine(mode, Listener(), model)
    await child.spawn()
    await asyncio.sleep(0.2)
    await child.abandon()


async def test_a_death_before_anybody_waits_is_told_by_start(model: int) -> None:
    listener = Listener()
    child = engine("good", listener, model)
    await child.spawn()
    await asyncio.shield(child._ready)
    child.kill()
    await child.wait()
    with pytest.raises(EngineDied, match="signal 9"):
        await child.start()
    assert listener.deaths == []


async def test_two_engines_at_once(model: int) -> None:
    """A successor may start while its predecessor still works."""
    listeners = Listener(), Listener()
    children = [engine("good", listener, model, n) for n, listener in enumerate(listeners, 1)]
    await asyncio.gather(*(child.start() for child in children))
    for child in children:
        child.submit(submit(child.generation, max_tokens=10 * child.generation))
    for listener in listeners:
        await listener.until_released()
    assert [listener.tokens for listener in listeners] == [list(range(10)), list(range(20))]
    await asyncio.gather(*(child.stop(5) for child in children))


async def test_a_child_that_does_not_answer(model: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HANDSHAKE_TIMEOUT_S", 0.2)
    with pytest.raises(EngineDied, match="did not answer"):
        await engine("mute", Listener(), model).start()


async def test_a_child_that_cannot_begin(model: int) -> None:
    listener = Listener()
    with pytest.raises(EngineDied, match="exited with code 1: cannot even begin"):
        await engine("stillborn", listener, model).start()
    assert listener.deaths == []


async def test_another_build(model: int) -> None:
    with pytest.raises(HandshakeError, match="restart the service"):
        await engine("other-build", Listener(), model).start()


async def test_a_refusal_to_load(model: int) -> None:
    with pytest.raises(LoadRefused) as caught:
        await engine("refuse", Listener(), model).start()
    assert caught.value.kind == "ModelFileError"
    assert str(caught.value) == "/some/model.gguf: header: is truncated"


async def test_a_start_that_is_cancelled_leaves_nothing(model: int) -> None:
    listener = Listener()
    child = engine("slow-load", listener, model)
    start = asyncio.create_task(child.start())
    await listener.news.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert listener.deaths == []


async def test_a_process_that_cannot_be_made(model: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(client.subprocess, "Popen", fail)
    with pytest.raises(EngineDied, match="Cannot allocate memory"):
        await engine("good", Listener(), model).start()


async def test_stop_by_force(model: int) -> None:
    listener = Listener()
    child = engine("deaf", listener, model)
    await child.start()
    await child.stop(0.2)
    assert "signal 9" in await child.wait()
    assert listener.deaths == []


async def test_output_is_logged_in_bounded_lines(model: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        child = engine("chatty", Listener(), model)
        await child.start()
        await child.stop(5)
    messages = [record.getMessage() for record in caplog.records]
    assert any(message.endswith("second line") for message in messages)
    assert max(map(len, messages)) < LINE_BYTES + 100


def test_the_same_on_uvloop(model: int) -> None:
    async def life() -> list[int]:
        listener = Listener()
        child = engine("good", listener, model)
        await child.start()
        child.submit(submit(max_tokens=5))
        await listener.until_released()
        child.kill()
        await listener.until_dead()
        return listener.tokens

    assert uvloop.run(life()) == list(range(5))


def test_only_the_main_thread_may_spawn(model: int) -> None:
    caught: list[BaseException] = []

    async def start() -> None:
        try:
            await engine("good", Listener(), model).start()
        except AssertionError as error:
            caught.append(error)

    thread = threading.Thread(target=asyncio.run, args=[start()])
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


async def test_the_launcher(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelFileError, match=r"model\.gguf: file: No such file"):
        EngineLauncher.open(EngineConfig(model_path=str(path)), {})
    path.write_text("weights")
    launcher = EngineLauncher.open(EngineConfig(model_path=str(path)), {"A": "b"})
    assert launcher.build == build_id()
    assert not os.get_inheritable(launcher.model_fd)
    assert os.pread(launcher.model_fd, 7, 0) == b"weights"
    first, second = launcher(1, Listener()), launcher(2, Listener())
    assert (first.generation, second.generation) == (1, 2)
    launcher.close()
