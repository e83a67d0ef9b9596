"""One HTTP answer cut at every step of its engine by a reload, a kill -9, a hang: the client is told the same.

The engine is the real loop over real block accounting, whose tokens prove from what state they came (`loop_engine`).
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from app.factory import create_service, public_app
from app.model import ServedModel
from app.patience import Backoff, Patience
from app.prompts import Prompts
from app.service import Service
from app.settings import Settings
from engine.client import EngineEvents
from engine.messages import Step
from tests.app.byte_model import PlainTemplate
from tests.app.loop_engine import LoopEngine
from tests.engine.scripted import VOCAB

TOKEN_BYTES = [b"", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", *(bytes([97 + n % 20]) for n in range(VOCAB - 5))]
TOKENS = 20
"""Of each answer."""


class FewTokens:
    """A vocabulary in which many characters take two tokens."""

    token_bytes: Sequence[bytes] = TOKEN_BYTES
    text_bytes = token_bytes
    vocab_size = VOCAB
    stop_ids = (VOCAB - 1,)
    add_bos = False
    adds_space = False

    def encode(self, text: str, *, parse_special: bool, add_bos: bool = False, limit: int | None = None) -> list[int]:
        return [ord(letter) % 7 for letter in text]


MODEL = ServedModel("few", "/models/few.gguf", "llama", "F32", 200, Prompts(FewTokens(), PlainTemplate()))  # type: ignore[arg-type]
CHAT = {"model": "few", "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}
TEXT = {"model": "few", "prompt": "Once upon a time", "max_tokens": TOKENS}
PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
EVERYTHING = {"n": 2, "seed": 3, "stop": "to be found", "logprobs": True, **PENALTIES}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "seed": 1}),
    "everything": ("/v1/chat/completions", {**CHAT, **EVERYTHING}),
    "completions": ("/v1/completions", {**TEXT, "seed": 5, "logprobs": 0, "n": 2}),
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


class World:
    """One service over one client's request; `deed` happens after the first engine's step number `at`."""

    def __init__(self, deed: "Deed | None" = None, at: int = 0) -> None:
        self._deed = deed
        self._at = at
        self.engines: list[LoopEngine] = []
        self.steps = 0
        """Of the first engine."""
        self.tokens: Counter[int] = Counter()
        """Of each generation."""
        patience = Patience(Backoff(first_s=0.0))
        self.service: Service = create_service(
            Settings(), MODEL, self._engine, api_keys=[], admin_key="k", patience=patience
        )

    def _engine(self, generation: int, events: EngineEvents) -> LoopEngine:
        engine = LoopEngine(generation, events, max_batch=4)
        deliver = events.on_step

        def on_step(step: Step) -> None:
            deliver(step)
            self._happen(generation, step)

        events.on_step = on_step  # type: ignore[method-assign]
        self.engines.append(engine)
        return engine

    def _happen(self, generation: int, step: Step) -> None:
        self.steps += generation == 1
        self.tokens[generation] += len(step.tokens)
        if self._deed is not None:
            self._deed(self, generation, generation == 1 and self.steps == self._at)

    async def answer(self, path: str, body: dict[str, Any]) -> Any:
        """What the client was told, put together."""
        supervisor = self.service.supervisor
        await supervisor.start()
        transport = httpx.ASGITransport(public_app(self.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.post(path, json=body)
        assert response.status_code == 200
        async with asyncio.timeout(60):
            while supervisor.reloading:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await supervisor.stop(1)
        assert self.service.scheduler.inflight_bytes == 0
        return joined(response.text) if body.get("stream") else without_identity(response.json())


Deed = Callable[[World, int, bool], None]
"""(world, generation, whether this is the step): called after every step of every engine."""


def reload(world: World, generation: int, is_time: bool) -> None:
    if is_time:
        world.service.supervisor.reload("operator")


def kill(world: World, generation: int, is_time: bool) -> None:
    if is_time:
        world.engines[0].kill()


def kill_thrice(world: World, generation: int, is_time: bool) -> None:
    """And each of the next two engines once it has said something."""
    if is_time or (generation in (2, 3) and world.tokens[generation]):
        world.engines[generation - 1].kill()


def reload_and_kill(world: World, generation: int, is_time: bool) -> None:
    """The successor dies at its first step."""
    if is_time:
        world.service.supervisor.reload("operator")
    if generation == 2:
        world.engines[1].kill()


def hang(world: World, generation: int, is_time: bool) -> None:
    life = world.service.supervisor._current
    if is_time and life is not None:
        world.engines[0].hang()
        world.service.supervisor._lose(life, "hang", "told to")


def without_identity(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def joined(stream: str) -> dict[str, Any]:
    """A stream as one object: text, log probabilities and end of each choice; usage; the number of last words."""
    told: dict[str, Any] = {"choices": {}, "usage": None, "ends": 0}
    for line in stream.splitlines():
        if line == "data: [DONE]":
            told["ends"] += 1
        elif line:
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk
            told["usage"] = chunk["usage"] or told["usage"]
            for choice in chunk["choices"]:
                add(told["choices"].setdefault(choice["index"], {"text": "", "logprobs": [], "finish": None}), choice)
    return told


def add(told: dict[str, Any], choice: dict[str, Any]) -> None:
    assert told["finish"] is None, "told more after the end"
    told["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    told["finish"] = choice["finish_reason"]
    if choice["logprobs"]:
        told["logprobs"].append(choice["logprobs"].get("content") or choice["logprobs"]["tokens"])


def flat(told: dict[str, Any]) -> dict[str, Any]:
    """Log probabilities of a stream without the borders of its chunks."""
    for choice in told["choices"].values() if isinstance(told["choices"], dict) else ():
        choice["logprobs"] = [entry for entries in choice["logprobs"] for entry in entries]
    return told


def ask(name: str, stream: bool) -> tuple[str, dict[str, Any]]:
    path, body = ASKS[name]
    if body.get("stop"):  # three characters from the middle of the undisturbed text, met there for the first time
        told = asyncio.run(World().answer(path, {**body, "stop": None}))
        whole = told["choices"][0]["message"]["content"]
        [body] = [{**body, "stop": whole[at : at + 3]} for at in range(9, 17) if whole.index(whole[at : at + 3]) == at][
            :1
        ]
    return path, {**body, **(STREAM if stream else {})}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hundreds of deaths are not worth a line each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("name", ASKS)
def test_a_cut_at_every_step_changes_nothing(name: str, stream: bool) -> None:
    path, body = ask(name, stream)
    undisturbed = World()
    expected = flat(asyncio.run(undisturbed.answer(path, body)))
    assert undisturbed.steps > 9
    for deed in (reload, kill, kill_thrice, reload_and_kill, hang):
        cuts = 0
        for at in range(1, undisturbed.steps + 1):
            world = World(deed, at)
            assert flat(asyncio.run(world.answer(path, body))) == expected, (deed.__name__, at)
            cuts += len(world.engines) > 1
        assert cuts >= undisturbed.steps - 2, "after the last words there is nothing to cut"


def test_the_answers_are_worth_cutting() -> None:
    """Stops fall within the text, and characters take more than one token."""
    path, body = ask("everything", stream=True)
    told = asyncio.run(World().answer(path, body))
    assert told["choices"][0]["finish"] == "stop"
    assert told["ends"] == 1
    path, body = ask("completions", stream=False)
    choices = asyncio.run(World().answer(path, body))["choices"]
    texts = [choice["text"] for choice in choices]
    assert texts[0] != texts[1]
    assert any("\ufffd" in text or "€" in text or "😀" in text for text in texts)
