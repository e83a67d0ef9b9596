# ruff: noqa: E501 - templates in one line
"""Chat templates: the golden ChatML, the variables that real families use, errors, and the choice from the file."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from app.text.template import CHATML, ChatTemplate, TemplateError, TemplateRefusal
from engine.errors import ModelFileError
from engine.gguf import GgufFile, open_gguf
from tests.app.text.families import LLAMA3, MISTRAL, QWEN3
from tests.engine.gguf.building import Draft
from tests.golden.cases import golden_dir

USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "wetter", "description": "Grad <C> für 'Köln'"}}


def render(source: str, messages: list[dict[str, object]] | None = None, **variables: object) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages or USER, **variables)


@pytest.mark.parametrize("case", json.loads((golden_dir() / "tokenizer" / "chat_template.json").read_text()))
def test_the_default_is_chatml_as_golden(case):
    template = ChatTemplate(CHATML)
    assert template.render(case["messages"], add_generation_prompt=case["add_generation_prompt"]) == case["text"]


# the families


def test_llama3_with_date_and_tools():
    template = ChatTemplate(LLAMA3, bos_token="<bos>", eos_token="<eos>", now=lambda: datetime(2026, 12, 1))
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "wetter", "arguments": {"ort": "Köln", "n": 1}}}]},
        {"role": "tool", "content": {"grad": 7}},
    ]
    assert template.render(messages, tools=[TOOL]) == (
        "<bos><|start_header_id|>system<|end_header_id|>\n\nToday: 01 Dec 2026\n\nFunctions:\n"
        + json.dumps(TOOL, indent=4, ensure_ascii=False)
        + "\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHow warm?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "wetter", "parameters": {"ort": "Köln", "n": 1}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n{"grad": 7}<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    with pytest.raises(TemplateRefusal, match=r"^One tool call at a time!$"):
        template.render([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": []}])


def test_mistral_alternation_and_concatenation():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "c"},
    ]
    assert render(MISTRAL, messages) == "<s>[INST] a[/INST] b</s>[INST] S\n\nc[/INST]"
    with pytest.raises(TemplateRefusal, match=r"^roles must alternate"):
        render(MISTRAL, [*messages, messages[-1]])


def test_qwen3_thinking_reasoning_parts_and_tools():
    assert render(QWEN3) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(QWEN3, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    assert render(QWEN3, enable_thinking=True).endswith("assistant\n")
    tools = render(QWEN3, tools=[TOOL])
    assert json.dumps(TOOL, ensure_ascii=False) in tools
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nold"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "new", "reasoning_content": "\nwhy\n"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"a": "x", "b": [1, None]}}}]},
        {"role": "user", "content": "<tool_response>5"},
    ]
    assert render(QWEN3, messages, add_generation_prompt=False) == (
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\nold<|im_end|>\n<|im_start|>user\n2<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nnew<|im_end|>\n"
        "<|im_start|>assistant\n\na=x\nb=[1, null]<|im_end|>\n<|im_start|>user\n<tool_response>5<|im_end|>\n"
    )


# single features


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\nx\n{% endif %}\ny", "x\ny"),  # trim_blocks
        ("a\n   {% if true %}b{% endif %}", "a\nb"),  # lstrip_blocks
        ("{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'a': '<é&\\'>'} | tojson }}", '{"a": "<é&\'>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}!", "Hi!"),
        ("{{ bos_token }}{{ eos_token }}{{ nothing }}", "<s></s>"),
        ("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", "True True True"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content=Hi;"),
        ("{{ messages[0].get('name', 'none') ~ 1 ~ none ~ [1] ~ missing }}", "none1None[1]"),
        ("{% set x %}{% for i in [1, 2] %}<{{ i }}>{% endfor %}{% endset %}{{ x | length }}{{ x }}", "6<1><2>"),
        ("{% macro f(a, b='z') %}{{ a ~ b }}{{ caller() if caller }}{% endmacro %}{{ f('x') }}{% call f('y') %}!{% endcall %}", "xzyz!"),
        ("{{ 'abcdef'[1:-1:2] ~ messages[-1:][0].role }}", "bduser"),
        ("{{ ['b', 'a'] | sort | join(', ') }} {{ 'x-y' | replace('-', '+') }} {{ ', '.join(['p', 'q']) }}", "a, b x+y p, q"),
        ("{{ messages | map(attribute='role') | map('upper') | list }}", "['USER']"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'a\nb' | indent(2) }} {{ 3 * 'ab' }} {{ 2 ** 5 % 7 }} {{ 7 // 2 }} {{ 'ab'.replace('a', 'c') }}", "a\n  b ababab 4 3 cb"),
        ("{{ {'b': 1, 'a': 2} | dictsort }}", "[('a', 2), ('b', 1)]"),
    ],
)  # fmt: skip
def test_feature(source, expected):
    assert render(source) == expected


def test_named_variables_cannot_be_replaced_and_others_can_be_given():
    assert render("{{ messages | length }}{{ bos_token }}{{ x }}", x=5, bos_token="evil") == "1<s>5"


def test_documents_and_the_default_clock():
    source = "{% for d in documents %}{{ d.title }}{% endfor %}{{ strftime_now('%Y') | int > 2000 }}"
    assert render(source, documents=[{"title": "T"}]) == "TTrue"


def test_the_tool_variant_serves_requests_with_tools():
    template = ChatTemplate("plain", "tools: {{ tools | length }}")
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[]) == "plain"
    assert template.render(USER, tools=[TOOL]) == "tools: 1"


# errors


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{{ messages[0].foo.bar }}", "chat template, line 2: 'dict object' has no attribute 'foo'"),
        ("{{ 1 / 0 }}", "chat template, line 1: ZeroDivisionError"),
        ("{{ messages[0].content | int / 'x' }}", "chat template, line 1: TypeError"),
        ("{{ 'no'.nothing() }}", "chat template, line 1: 'str object' has no attribute 'nothing'"),
        ("{{ undefined_function() }}", "chat template, line 1: 'undefined_function' is undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ '{}'.format(1) }}", "unsafe"),
        ("{{ 'a'.encode() }}", "unsafe"),
        ("{{ '%s' % 1 }}", "formatting with % is not available"),
        ("{{ range }}", "cannot show a function"),
        ("{{ cycler(1).next }}", "cannot show a method"),
        ("{{ 'x' | tojson(indent='y') }}", "TypeError"),
    ],
)
def test_an_error_names_the_line_and_is_of_one_class(source, message):
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert message in str(caught.value)
    assert not isinstance(caught.value, TemplateRefusal)


def test_an_error_does_not_echo_a_long_value():
    with pytest.raises(TemplateError) as caught:
        render("{{ messages[0][messages[0].content].x }}", [{"role": "user", "content": "s" * 100_000}])
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("{{ x | nosuch }}", "line 1: No filter named 'nosuch'"),
        ("\n{% include 'x' %}", "line 2: {% include %} is not available"),
        ("{% import 'x' as y %}", "{% import %} is not available"),
        ("{% extends 'x' %}", "{% extends %} is not available"),
        ("{% filter upper %}x{% endfilter %}", "{% filter %} is not available"),
        ("{% set x | upper %}x{% endset %}", "a filter on {% set %} is not available"),
        ("{{ x | xmlattr }}", "No filter named 'xmlattr'"),
        ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "cannot be compiled (RecursionError)"),
        ("{% if 1 %}" * 150 + "{% endif %}" * 150, "cannot be compiled"),
        ("x" * 200_000, "too many for a chat template"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_when_it_is_read(source, message):
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source)
    assert message in str(caught.value)


def test_too_long_an_output_is_refused(monkeypatch):
    monkeypatch.setattr("app.text.template.MAX_OUTPUT_CHARS", 1000)
    assert len(render("{{ 'x' * 1000 }}")) == 1000
    with pytest.raises(TemplateError, match="too much text"):
        render("{{ 'x' * 1000 }}y")


def test_a_loop_that_collects_messages_stays_cheap():
    """Thousands of messages appended one by one, as Mistral's template does, are within the budget."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": "word " * 40} for n in range(2001)]
    assert len(render(MISTRAL, turns)) > 400_000


# from a file


def file_with(folder: Path, **templates: str) -> GgufFile:
    return open_gguf(Draft({key.replace("__", "."): text for key, text in templates.items()}).write(folder))


class Specials:
    bos_token = "<s>"
    eos_token = None

    def __init__(self, *tokens: str) -> None:
        self.specials = {token: n for n, token in enumerate(tokens)}


def test_the_template_and_its_tool_variant_come_from_the_file(tmp_path):
    source = "{{ bos_token }}a{{ eos_token }}"
    file = file_with(tmp_path, tokenizer__chat_template=source, tokenizer__chat_template__tool_use="b")
    template = ChatTemplate.from_gguf(file, Specials())
    assert template.render(USER) == "<s>a"
    assert template.render(USER, tools=[TOOL]) == "b"


def test_a_file_without_template_uses_chatml_only_if_its_tokens_exist(tmp_path):
    file = file_with(tmp_path)
    assert (
        ChatTemplate.from_gguf(file, Specials("<|im_start|>", "<|im_end|>")).render(USER).startswith("<|im_start|>user")
    )
    with pytest.raises(TemplateError, match=r"no chat template \(tokenizer.chat_template\)"):
        ChatTemplate.from_gguf(file, Specials("<|im_start|>")).render(USER)


def test_a_broken_template_names_file_and_field(tmp_path):
    file = file_with(tmp_path, tokenizer__chat_template="{{ x")
    with pytest.raises(ModelFileError, match=r"model.gguf: tokenizer.chat_template: line 1"):
        ChatTemplate.from_gguf(file, Specials())
