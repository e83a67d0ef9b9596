"""The model file's chat template: messages in, prompt text out."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import jinja2

from app.text.budget import MAX_OUTPUT_CHARS, Budget, TemplateError
from app.text.filters import BUDGET
from app.text.guard import guard
from app.text.sandbox import BoundedEnvironment
from engine.errors import ModelFileError
from engine.gguf import GgufFile

__all__ = ["ChatTemplate", "TemplateError", "TemplateRefusal"]

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Used when a file has no template but the two tokens of ChatML."""

MAX_SOURCE_CHARS = 128 << 10
MAX_DATE_FORMAT_CHARS = 256
MAX_MESSAGE_CHARS = 500
_KEY = "tokenizer.chat_template"
_FILENAME = "<chat template>"
_RAISED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What an expression in a template can raise besides Jinja's own errors."""


class TemplateRefusal(TemplateError):
    """The template itself refused the messages (`raise_exception`), in its own words."""


class SpecialTokens(Protocol):
    """What a template needs of the tokenizer."""

    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token(self) -> str | None: ...
    @property
    def specials(self) -> Mapping[str, int]: ...


class ChatTemplate:
    """A compiled template, and the one for requests with tools if the file has two. Thread-safe.

    Args:
        source: Jinja text as Hugging Face's templates are written; None when the file has none.
        tool_source: the variant for requests with tools.
        now: the clock behind `strftime_now`.
    Raises:
        TemplateError: the text is not a template, or uses what is not available (`app/text/filters.py`).
    """

    def __init__(
        self,
        source: str | None,
        tool_source: str | None = None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._now = now
        self._constants = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._environment = BoundedEnvironment()
        self._environment.globals |= {"raise_exception": _refuse, "strftime_now": self._strftime_now}
        self._template = None if source is None else self._compile(source)
        self._tool_template = self._template if tool_source is None else self._compile(tool_source)

    @classmethod
    def from_gguf(cls, gguf: GgufFile, tokenizer: SpecialTokens) -> "ChatTemplate":
        """`tokenizer.chat_template` and its variant `.tool_use`; without one ChatML, if its tokens exist.

        A file with neither is served all the same; only `render` refuses.

        Raises:
            ModelFileError: a template that cannot be used.
        """
        source = gguf.text(_KEY, None)
        if source is None and {"<|im_start|>", "<|im_end|>"} <= tokenizer.specials.keys():
            source = CHATML
        tool_source = gguf.text(f"{_KEY}.tool_use", None)
        try:
            return cls(source, tool_source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        except TemplateError as error:
            raise ModelFileError(gguf.path, _KEY, str(error)) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt. `extra` are further variables (`enable_thinking`, …); the named ones cannot be replaced.

        Raises:
            TemplateRefusal: the template refuses the messages; the message is its own.
            TemplateError: it fails, or goes beyond `app/text/budget.py`.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise TemplateError(f"the model file has no chat template ({_KEY}); it can serve /v1/completions")
        variables = {
            **extra,
            **self._constants,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            BUDGET: Budget(),
        }
        try:
            return _bounded_join(template, variables)
        except jinja2.TemplateError as error:
            raise TemplateError(_located(error, str(error.message))) from error
        except _RAISED as error:
            raise TemplateError(_located(error, type(error).__name__)) from error

    def _compile(self, source: str) -> jinja2.Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"{len(source)} characters are too many for a chat template ({MAX_SOURCE_CHARS})")
        environment = self._environment
        try:
            code = environment.compile(guard(environment.parse(source)), filename=_FILENAME)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error
        except (MemoryError, RecursionError, SyntaxError, ValueError) as error:  # nested beyond what Python can compile
            raise TemplateError(f"the chat template cannot be compiled ({type(error).__name__})") from error
        return environment.template_class.from_code(environment, code, environment.make_globals(None))

    def _strftime_now(self, date_format: str) -> str:
        if len(date_format) > MAX_DATE_FORMAT_CHARS:
            raise TemplateError("the chat template's date format is too long")
        return self._now().strftime(date_format)


def _refuse(message: object) -> str:
    raise TemplateRefusal(str(message)[:MAX_MESSAGE_CHARS])


def _bounded_join(template: jinja2.Template, variables: dict[str, Any]) -> str:
    pieces, chars = [], 0
    for piece in template.generate(variables):
        chars += len(piece)
        if chars > MAX_OUTPUT_CHARS:
            raise TemplateError("the chat template makes too much text")
        pieces.append(piece)
    return "".join(pieces)


def _located(error: Exception, what: str) -> str:
    """Names the template's line, which Jinja has put into the traceback."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILENAME]
    return f"chat template, line {lines[-1] if lines else '?'}: {what[:MAX_MESSAGE_CHARS]}"
