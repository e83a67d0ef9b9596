"""The filters of chat templates: those that real templates use, none that a template could blow up with.

Jinja's own stay as they are where the result is no longer than what goes in; the others ask the budget first.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import Environment, Undefined, pass_context
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context

from app.text.budget import ITEM_CHARS, Budget, TemplateError

BUDGET = " budget"
"""The rendering's Budget among the template's variables; no name in a template has a space."""

# fmt: off
_SAFE = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items",
    "last", "length", "list", "lower", "max", "min", "reject", "rejectattr", "reverse", "safe", "select", "selectattr",
    "sort", "title", "trim", "unique", "upper",
)
# fmt: on


def budget_of(context: Context) -> Budget:
    budget: Budget = context.parent[BUDGET]
    return budget


def as_text(context: Context, value: object) -> str:
    """What `{{ value }}` shows; charged."""
    budget = budget_of(context)
    if isinstance(value, (list, tuple, dict)):
        budget.charge(budget.weigh(value)[0])
    elif not isinstance(value, (str, int, float, Undefined)) and value is not None:
        raise TemplateError(f"a chat template cannot show a {type(value).__name__}")
    text = str(value)
    budget.charge(len(text))
    return text


@pass_context
def to_text(context: Context, value: object) -> str:
    return as_text(context, value)


@pass_context
def join(context: Context, value: Iterable[object], d: object = "", attribute: str | int | None = None) -> str:
    items = value if attribute is None else map(make_attrgetter(context.environment, attribute), value)
    texts = [as_text(context, item) for item in items]
    separator = str(d)
    budget_of(context).charge(len(separator) * len(texts))
    return separator.join(texts)


@pass_context
def replace(context: Context, s: object, old: str, new: str, count: int | None = None) -> str:
    text, old, new = as_text(context, s), str(old), str(new)
    budget_of(context).charge(text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


@pass_context
def indent(context: Context, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, int) else len(width)
    budget_of(context).charge((s.count("\n") + 2) * margin)
    indented: str = FILTERS["indent"](s, width, first, blank)
    return indented


@pass_context
def map_items(context: Context, value: Iterable[object], *args: Any, **kwargs: Any) -> Iterator[object]:
    for item in FILTERS["map"](context, value, *args, **kwargs):
        budget_of(context).charge_for(item)
        yield item


@pass_context
def to_json(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face's: no HTML escapes, characters as they are."""
    budget = budget_of(context)
    weight, depth = budget.weigh(value)
    lines = weight // ITEM_CHARS
    budget.charge(weight + lines * (indent or 0) * depth + lines * sum(map(len, separators or ())))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def chat_filters(environment: Environment) -> dict[str, Callable[..., Any]]:
    """The table for `environment.filters`; any other name is an error when the template is read."""
    return {
        **{name: environment.filters[name] for name in _SAFE},
        "indent": indent,
        "join": join,
        "map": map_items,
        "replace": replace,
        "string": to_text,
        "tojson": to_json,
    }
