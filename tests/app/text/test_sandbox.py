# ruff: noqa: E501 - templates in one line
"""What a hostile chat template runs into: nested loops and macros the clock, the others a refusal before the work."""

import time
import tracemalloc

import pytest

from app.text.template import ChatTemplate, TemplateError

NS = "{% set ns = namespace(x='ab', l=[1], m=[1], k=none) %}"
HOSTILE = {
    "repetition": "{{ 'a' * 10**9 }}",
    "repetition, other way round": "{{ 10**9 * 'a' }}",
    "constant repetition": "{{ 'a' * 1000000000 }}",
    "list repetition": "{{ [1] * 10**9 }}",
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "recursive loop": "{% for i in [[1,1]] recursive %}{{ loop([i, i]) }}{% endfor %}",
    "constant text in loops": "{% for i in range(100000) %}" + "x" * 50_000 + "{% endfor %}",
    "constant text in a macro": "{% macro m() %}" + "x" * 50_000 + "{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}",
    "constant text in set": "{% set x %}{% for i in range(100000) %}" + "x" * 50_000 + "{% endfor %}{% endset %}",
    "doubling by ~": NS + "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by +": NS + "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by set": NS + "{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling by join": NS + "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "doubling by list": NS + "{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "sharing in lists": NS + "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "sharing in dicts": NS + "{% for i in range(60) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l | tojson }}",
    "sharing in dict()": NS + "{% for i in range(60) %}{% set ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}",
    "sharing compared": NS + "{% for i in range(60) %}{% set ns.l = (ns.l, ns.l) %}{% set ns.m = (ns.m, ns.m) %}{% endfor %}{{ ns.l == ns.m }}",
    "sharing in varargs": "{% macro m() %}{{ m(varargs, varargs) }}{% endmacro %}{{ m(1) }}",
    "sharing in views": NS + "{% for i in range(60) %}{% set ns.l = {'a': ns.l, 'b': ns.l}.values() %}{% endfor %}{{ ns.l | list }}",
    "depth": NS + "{% for i in range(90000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
    "kept slices": "{% set b = 'b' * 1000000 %}" + NS + "{% for i in range(99999) %}{% set ns.k = [ns.k, b[1:]] %}{% endfor %}",
    "kept filter results": "{% set b = 'b' * 1000000 %}" + NS + "{% for i in range(99999) %}{% set ns.m = b | upper %}{% endfor %}",
    "kept method results": "{% set b = 'b' * 1000000 %}" + NS + "{% for i in range(99999) %}{% set ns.m = b.upper() %}{% endfor %}",
    "split": "{% set b = 'bb ' * 100000 %}{% for i in range(99999) %}{% set y = b.split() %}{% endfor %}",
    "map": "{% set b = ['b' * 1000000] * 10 %}{% for i in range(99999) %}{% set y = b | map('upper') | list %}{% endfor %}",
    "replace": "{% set b = 'b' * 1000000 %}{{ b | replace('b', b) }}",
    "replace nothing": "{% set b = 'b' * 1000000 %}{{ b | replace('', b) }}",
    "str.replace": "{% set b = 'b' * 1000000 %}{{ b.replace('b', b) }}",
    "join": "{% set b = 'b' * 100000 %}{{ range(99999) | join(b) }}",
    "str.join": "{% set b = 'b' * 100000 %}{{ b.join(b) }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "tojson indent": "{{ [[1]] | tojson(indent=10**9) }}",
    "power": "{{ 2 ** 100000000 }}",
    "power of a power": "{{ 9 ** (9 ** 9) }}",
    "squares": NS + "{% set ns.k = 3 %}{% for i in range(99) %}{% set ns.k = ns.k * ns.k %}{% endfor %}",
    "range": "{{ range(10**12) | list }}",
    "date": "{{ strftime_now('%Y' * 100000) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_fails_in_bounded_time_and_memory(name, monkeypatch):
    monkeypatch.setattr("app.text.budget.MAX_SECONDS", 0.25)
    monkeypatch.setattr("app.text.budget.MAX_MADE_CHARS", 16 << 20)
    monkeypatch.setattr("app.text.budget.MAX_VALUE_CHARS", 1 << 20)
    template = ChatTemplate(HOSTILE[name])
    begin = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError):
            template.render([{"role": "user", "content": "Hi"}])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20
    assert time.monotonic() - begin < 10  # a hang guard: each of these would take hours
