import json
from typing import Any

import pytest

from app.errors import InvalidRequest, UnsupportedParameter
from app.schemas.body import parse
from app.schemas.chat import ChatBody
from app.schemas.completions import CompletionBody
from app.schemas.generation import GenerationBody

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatBody:
    body = parse(json.dumps({**CHAT, **fields}).encode(), ChatBody)
    body.check(1000)
    body.template_messages()
    return body


def completion(**fields: Any) -> CompletionBody:
    body = parse(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CompletionBody)
    body.check(1000)
    return body


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\x00",
        b"not json",
        b'{"model": NaN}',
        b'{"model": Infinity}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\ud800 and more text"}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}]} trailing',
        b"\xef\xbb\xbf{}",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 100_000,
    ],
)
def test_what_is_no_json_is_400_and_not_repeated(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse(raw, ChatBody)
    assert raised.value.status == 400
    assert raised.value.code in ("invalid_json", "invalid_value")
    assert len(raised.value.message) < 100


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "warm-secret"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"max_tokens": 10**20}, "max_tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": "much"}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"model": 5}, "model"),
        ({"user": 5}, "user"),
    ],
)
def test_a_wrong_value_is_named_and_not_repeated(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)
    assert "secret" not in raised.value.message
    assert "wizard" not in raised.value.message


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_parameter_is_named(missing: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse(json.dumps({key: value for key, value in CHAT.items() if key != missing}).encode(), ChatBody)
    assert (raised.value.param, raised.value.code) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {}}, "prediction"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"mirostat": 2}, "mirostat"),
        ({"no such thing\n": 1}, "(a field with an unusual name)"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0].image_url",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as raised:
        chat(**fields)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [1000]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": None}, "prompt"),
        ({"messages": []}, "messages"),
    ],
)
def test_completions_refuse_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        completion(**fields)
    assert raised.value.param == param


def test_null_is_the_default_of_every_optional_parameter() -> None:
    for schema, required in ((ChatBody, {"model", "messages"}), (CompletionBody, {"model", "prompt"})):
        optional = set(schema.__struct_fields__) - required
        base = {**CHAT, "prompt": "hi"}
        body = {name: base[name] for name in required} | dict.fromkeys(optional)
        parsed = parse(json.dumps(body).encode(), schema)
        parsed.check(1000)
        assert parsed == parse(json.dumps({name: base[name] for name in required}).encode(), schema)


def test_what_asks_for_nothing_passes() -> None:
    chat(tools=[], tool_choice="none", functions=[], function_call="auto", modalities=["text"])
    chat(response_format={"type": "text"})
    chat(user="u", metadata={"a": "b"}, store=True, service_tier="auto")
    completion(echo=False, best_of=1)


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None}
    chat(messages=[{**answer, "function_call": None, "tool_calls": None}, {"role": "user", "content": "and?"}])


def test_messages_as_templates_know_them() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ]
    )
    assert body.template_messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "name": "ann", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]


def test_prompts() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]


def test_sampling_carries_every_parameter() -> None:
    body = chat(
        temperature=0.5,
        top_k=7,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={"5": -100},
        seed=-1,
    )
    sampling = body.sampling(body.resolved_seed(), 3, 2)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.8, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.3, 0.4)
    assert (sampling.logit_bias, sampling.seed, sampling.choice, sampling.logprobs) == (((5, -100.0),), 2**64 - 1, 3, 2)
    assert chat(top_k=-1).sampling(0, 0, None).top_k == 0
    assert chat(temperature=0).sampling(0, 0, None).temperature == 0


def test_a_seed_is_drawn_when_none_is_given() -> None:
    drawn = {chat().resolved_seed() for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 2**64 for seed in drawn)


def test_defaults() -> None:
    body: GenerationBody = chat()
    assert (body.limit, body.choices, body.stops, body.wants_usage) == (None, 1, (), False)
    assert chat(max_tokens=5).limit == chat(max_completion_tokens=5).limit == 5
    assert completion().limit == 16
    assert chat(logprobs=True).logprobs_asked == 0
    assert chat(logprobs=False).logprobs_asked is None
    assert chat(stop="x").stops == ("x",)
