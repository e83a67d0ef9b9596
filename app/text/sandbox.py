"""Jinja's immutable sandbox, with every operation that could take long or grow charged to a Budget."""

import types
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.text.budget import ITEM_CHARS, MAX_INTEGER_BITS, TemplateError, size
from app.text.filters import as_text, budget_of, chat_filters, join, replace, to_text

# fmt: off
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset((
        "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal", "isdigit", "islower",
        "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix",
        "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines",
        "startswith", "strip", "title", "upper",
    )),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
# fmt: on
"""Methods of Python's own types that a template may reach; of these only join and replace can make text grow."""


class Generation(Extension):
    """`{% generation %}`: marks the assistant's part for training; here only what is inside matters."""

    tags = {"generation"}  # noqa: RUF012 - the type that Jinja declares

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """For templates rewritten by `app.text.guard`, whose hooks are the methods with a context as first argument."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, Generation],
            finalize=to_text,
            optimized=False,  # nothing is computed while compiling, where there is no budget yet
        )
        del self.globals["lipsum"]
        self.filters = chat_filters(self)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(value, types.BuiltinMethodType):
            allowed = (names for kind, names in _METHODS.items() if isinstance(obj, kind))
            return attr in next(allowed, ())
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """str.format is an attribute like any other, and not among the safe ones."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is __self:  # a hook
            return __obj(*args)
        if isinstance(owner, str) and __obj.__name__ == "join":
            return join(__context, args[0], owner)
        if isinstance(owner, str) and __obj.__name__ == "replace":
            return replace(__context, owner, *args)
        budget = budget_of(__context)
        for value in (*args, *kwargs.values()):
            budget.weigh(value)  # a macro may collect its arguments
        result = super().call(__context, __obj, *args, **kwargs)
        budget.charge(ITEM_CHARS * len(result) if isinstance(result, list) else size(result))
        budget.weigh(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise TemplateError("formatting with % is not available in a chat template")
        budget = budget_of(context)
        budget.charge(_cost(operator, left, right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (list, tuple)):  # joined or repeated: no need to look at every element again
            parts = [budget.weigh(part) for part in (left, right)]
            times = right if isinstance(right, int) else left if isinstance(left, int) else 1
            budget.record(result, sum(weight for weight, _ in parts) * max(times, 1), max(depth for _, depth in parts))
        return result

    def tick(self, context: Context, chars: int) -> None:
        budget_of(context).charge(chars)

    def written(self, context: Context, *values: Any) -> str:
        return "".join([as_text(context, value) for value in values])

    def cut(self, context: Context, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return self.charged(context, value[start:stop:step])

    def charged(self, context: Context, value: Any) -> Any:
        budget_of(context).charge_for(value)
        return value

    def weighed(self, context: Context, value: Any) -> Any:
        budget_of(context).weigh(value)
        return self.charged(context, value)


def _cost(operator: str, left: Any, right: Any) -> int:
    """Upper bound of the result's size, known before it is made. Raises TemplateError for large integers."""
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), right.bit_length())
        if operator == "**":
            bits = left.bit_length() * max(right, 1)
        if bits > MAX_INTEGER_BITS:
            raise TemplateError(f"a chat template computes with integers of {MAX_INTEGER_BITS} bits at most")
    elif operator == "*" and isinstance(right, int):
        return size(left) * max(right, 0)
    elif operator == "*" and isinstance(left, int):
        return size(right) * max(left, 0)
    return size(left) + size(right)
