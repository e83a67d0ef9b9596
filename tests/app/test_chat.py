"""Chat completions as the `openai` SDK sees them."""

import asyncio
from typing import Any

import openai
import pytest

from tests.app.byte_model import EOS
from tests.app.running import Running, says, service

USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(hello: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=hello.v1, api_key="unused", max_retries=0)


def test_plain(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="bytes", messages=USER)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "bytes"
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello there.")
    assert answer.usage is not None
    prompt = len("user: hi\nassistant: ")
    # The end-of-text token is counted, as the model had to make it.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, len("Hello there.") + 1)
    assert answer.usage.total_tokens == prompt + len("Hello there.") + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="bytes", messages=USER, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.created for chunk in chunks} == {chunks[0].created}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there."
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_and_only_if_asked(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="bytes", messages=USER)
    *chunks, last = client.chat.completions.create(
        model="bytes", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert last.usage == plain.usage
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_limits(client: openai.OpenAI) -> None:
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        answer = client.chat.completions.create(model="bytes", messages=USER, **limit)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == "Hello"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 5


def test_the_context_is_a_limit_too() -> None:
    with service(says("x" * 50), engine={"max_context": 24}) as running:
        client = openai.OpenAI(base_url=running.v1, api_key="unused", max_retries=0)
        answer = client.chat.completions.create(model="bytes", messages=USER, max_tokens=1000)
        prompt = len("user: hi\nassistant: ")
        assert answer.choices[0].message.content == "x" * (24 - prompt)
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(("stop", "text"), [("there", "Hello "), (["zzz", "e."], "Hello ther"), ("lo t", "Hel")])
def test_stop_strings(client: openai.OpenAI, stop: Any, text: str) -> None:
    plain = client.chat.completions.create(model="bytes", messages=USER, stop=stop)
    assert (plain.choices[0].message.content, plain.choices[0].finish_reason) == (text, "stop")
    chunks = list(client.chat.completions.create(model="bytes", messages=USER, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_that_does_not_come_is_not_held_back_for_good(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="bytes", messages=USER, stop="there.!", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there."


def test_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="bytes", messages=USER, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"Hello there."}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * 13
    assert answer.usage.prompt_tokens == len("user: hi\nassistant: ")
    texts = {0: "", 1: "", 2: ""}
    ends = dict.fromkeys(texts, 0)
    for chunk in client.chat.completions.create(model="bytes", messages=USER, n=3, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] += choice.finish_reason is not None
    assert set(texts.values()) == {"Hello there."}
    assert set(ends.values()) == {1}


def test_logprobs_with_true_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="bytes", messages=USER, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None
    assert b"".join(bytes(entry.bytes or []) for entry in entries) == b"Hello there."
    assert [top.token for top in entries[0].top_logprobs] == ["H", "I"]
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -1.0]
    streamed = []
    for chunk in client.chat.completions.create(
        model="bytes", messages=USER, logprobs=True, top_logprobs=2, stream=True
    ):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in entries]


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="bytes", messages=USER, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert all(entry.top_logprobs == [] for entry in answer.choices[0].logprobs.content)


def test_logprobs_of_half_a_character() -> None:
    with service(says("né")) as running:
        client = openai.OpenAI(base_url=running.v1, api_key="unused")
        answer = client.chat.completions.create(model="bytes", messages=USER, logprobs=True)
        assert answer.choices[0].message.content == "né"
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content
        assert entries is not None
        assert [entry.token for entry in entries] == ["n", "\ufffd", "\ufffd"]
        assert b"".join(bytes(entry.bytes or []) for entry in entries) == "né".encode()


def test_ignore_eos() -> None:
    with service([*says("ab"), EOS, *says("cd")]) as running:
        client = openai.OpenAI(base_url=running.v1, api_key="unused")
        answer = client.chat.completions.create(model="bytes", messages=USER, max_tokens=20)
        assert answer.choices[0].message.content == "ab"
        answer = client.chat.completions.create(
            model="bytes", messages=USER, max_tokens=5, extra_body={"ignore_eos": True}
        )
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abcd", "length")


def test_what_the_engine_is_asked() -> None:
    seen = []

    def script(submit: Any) -> list[int]:
        seen.append(submit)
        return says("ok")

    with service(script) as running:
        client = openai.OpenAI(base_url=running.v1, api_key="unused")
        client.chat.completions.create(
            model="bytes",
            messages=USER,
            n=2,
            seed=5,
            temperature=0.3,
            top_p=0.9,
            logit_bias={"65": -100},
            presence_penalty=0.1,
            max_tokens=7,
            extra_body={"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.1},
        )
        client.chat.completions.create(model="bytes", messages=USER, extra_body={"cache_prompt": False})
    assert [submit.sampling.choice for submit in seen] == [0, 1, 0]
    assert [submit.cache_prompt for submit in seen] == [True, True, False]
    sampling = seen[0].sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.3, 0.9, 3)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.presence_penalty) == (0.05, 1.1, 0.1)
    assert (sampling.logit_bias, sampling.logprobs) == (((65, -100.0),), None)
    assert (seen[0].max_tokens, seen[0].stop_ids) == (7, (EOS,))
    assert bytes(seen[0].prompt_ids) == b"user: hi\nassistant: "


def test_a_prompt_of_parts_and_roles() -> None:
    with service(lambda submit: submit.prompt_ids) as running:
        client = openai.OpenAI(base_url=running.v1, api_key="unused")
        messages: Any = [
            {"role": "developer", "content": "short"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
        answer = client.chat.completions.create(model="bytes", messages=messages)
        assert answer.choices[0].message.content == "system: short\nuser: a\nb\nassistant: "


async def test_the_async_client(hello: Running) -> None:
    async with openai.AsyncOpenAI(base_url=hello.v1, api_key="unused") as client:
        stream = await client.chat.completions.create(model="bytes", messages=USER, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "Hello there."


async def test_32_streams_at_once_equal_their_solo_texts() -> None:
    def script(submit: Any) -> list[int]:
        seed = submit.sampling.seed
        return says("".join(f"{seed}·{position} " for position in range(15)))

    with service(script) as running:
        async with openai.AsyncOpenAI(base_url=running.v1, api_key="unused") as client:

            async def text(seed: int) -> str:
                stream = await client.chat.completions.create(model="bytes", messages=USER, seed=seed, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            solo = [await text(seed) for seed in range(32)]
            together = await asyncio.gather(*(text(seed) for seed in range(32)))
            assert together == solo
            assert solo[7].startswith("7·0 7·1 ")
