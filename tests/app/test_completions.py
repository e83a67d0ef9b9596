"""The older completions route as the `openai` SDK sees it."""

from typing import Any

import openai
import pytest

from engine.messages import Submit
from tests.app.byte_model import BOS, ByteTokenizer
from tests.app.running import Running, says, service


@pytest.fixture(scope="module")
def client(hello: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=hello.v1, api_key="unused", max_retries=0)


def test_plain_and_stream(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="bytes", prompt="Say it: ", max_tokens=50)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello there.", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("Say it: ")
    chunks = list(client.completions.create(model="bytes", prompt="Say it: ", max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there."
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_sixteen_tokens_unless_asked_otherwise() -> None:
    with service(says("0123456789" * 3)) as running:
        client = openai.OpenAI(base_url=running.v1, api_key="unused")
        answer = client.completions.create(model="bytes", prompt="x")
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("0123456789012345", "length")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([100, 101], ["de"]),
        ([[100], [101, 102]], ["d", "ef"]),
    ],
)
def test_each_kind_of_prompt(prompt: Any, texts: list[str]) -> None:
    with service(lambda submit: submit.prompt_ids) as running:
        client = openai.OpenAI(base_url=running.v1, api_key="unused")
        answer = client.completions.create(model="bytes", prompt=prompt, n=2)
        assert [choice.index for choice in answer.choices] == list(range(2 * len(texts)))
        assert [choice.text for choice in answer.choices] == [text for text in texts for _ in range(2)]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(len(text) for text in texts)
        assert answer.usage.completion_tokens == sum(2 * (len(text) + 1) for text in texts)


def test_the_older_shape_of_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="bytes", prompt="x", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["H", "e", "l"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"H": -0.5, "I": -1.0}
    assert logprobs.text_offset == [0, 1, 2]
    streamed: dict[str, list[Any]] = {"tokens": [], "text_offset": []}
    for chunk in client.completions.create(model="bytes", prompt="x", max_tokens=3, logprobs=2, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed["tokens"] += chunk.choices[0].logprobs.tokens or []
            streamed["text_offset"] += chunk.choices[0].logprobs.text_offset or []
    assert streamed == {"tokens": ["H", "e", "l"], "text_offset": [0, 1, 2]}


def test_logprobs_of_half_a_character() -> None:
    with service(says("é!")) as running:
        client = openai.OpenAI(base_url=running.v1, api_key="unused")
        answer = client.completions.create(model="bytes", prompt="x", max_tokens=3, logprobs=0)
        logprobs = answer.choices[0].logprobs
        assert answer.choices[0].text == "é!"
        assert logprobs is not None
        assert logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9", "!"]
        assert logprobs.text_offset == [0, 1, 1]
        assert logprobs.top_logprobs is None


def test_a_completion_goes_on_where_a_chat_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece-style: the space of the first word belongs between a prompt and its completion, not before a chat's
    answer; both prompts begin with the token for the beginning, once."""
    monkeypatch.setattr(ByteTokenizer, "adds_space", True)
    monkeypatch.setattr(ByteTokenizer, "add_bos", True)
    prompts: list[list[int]] = []

    def script(submit: Submit) -> list[int]:
        prompts.append(submit.prompt_ids)
        return says(" you")

    with service(script) as running:
        client = openai.OpenAI(base_url=running.v1, api_key="unused")
        assert client.completions.create(model="bytes", prompt="Hello").choices[0].text == " you"
        chat = client.chat.completions.create(model="bytes", messages=[{"role": "user", "content": "Hello"}])
        assert chat.choices[0].message.content == "you"
    assert [(ids[0], ids.count(BOS)) for ids in prompts] == [(BOS, 1)] * 2
