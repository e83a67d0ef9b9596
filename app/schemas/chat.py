"""POST /v1/chat/completions: the body."""

from typing import Annotated

import msgspec
from msgspec import Meta

from app.errors import InvalidRequest, UnsupportedParameter
from app.schemas.generation import GenerationBody, Limit, NothingIn, Refused, TopLogprobs, refuse_unless

ROLES = ("system", "developer", "user", "assistant", "tool")


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a message. Others than text bring fields of their own and are refused by these."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message; the fields of an answer may be sent back as they came."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: NothingIn = None
    function_call: Refused = None
    refusal: Refused = None
    annotations: NothingIn = None
    audio: Refused = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str


class ChatBody(GenerationBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    tools: NothingIn = None
    tool_choice: str | dict[str, object] | None = None
    functions: NothingIn = None
    function_call: str | dict[str, object] | None = None
    parallel_tool_calls: Refused = None
    audio: Refused = None
    prediction: Refused = None
    prompt_cache_key: Refused = None
    reasoning_effort: Refused = None
    safety_identifier: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None

    @property
    def logprobs_asked(self) -> int | None:
        """None: none; k: the chosen token's and those of the k best."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def check(self, vocabulary: int) -> None:
        super().check(vocabulary)
        refuse_unless("tool_choice", self.tool_choice in (None, "none", "auto"))
        refuse_unless("function_call", self.function_call in (None, "none", "auto"))
        refuse_unless("modalities", self.modalities in (None, ["text"]))
        if self.response_format is not None and self.response_format.type != "text":
            raise UnsupportedParameter("response_format", "response_format other than text")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens contradicts max_completion_tokens.", param="max_tokens")

    def template_messages(self) -> list[dict[str, object]]:
        """The messages as chat templates know them. Raises InvalidRequest naming the message."""
        return [_template_message(message, f"messages[{index}]") for index, message in enumerate(self.messages)]


def _template_message(message: Message, place: str) -> dict[str, object]:
    if message.role not in ROLES:
        raise InvalidRequest(f"{place}.role: must be one of {', '.join(ROLES)}.", param=f"{place}.role")
    if message.role == "tool" and message.tool_call_id is None:
        param = f"{place}.tool_call_id"
        raise InvalidRequest(f"Missing required parameter: {param}.", param=param, code="missing_required_parameter")
    if message.role != "tool" and message.tool_call_id is not None:
        raise InvalidRequest(f"{place}.tool_call_id: is only for role tool.", param=f"{place}.tool_call_id")
    # Templates know `system`; `developer` is OpenAI's newer word for it.
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, object] = {"role": role, "content": _text(message.content, f"{place}.content")}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    return rendered


def _text(content: str | list[Part] | None, place: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"{place}: must be a string or a list of text parts.", param=place)
    texts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise UnsupportedParameter(f"{place}[{index}].type", f"{place}[{index}]: a part other than text")
        if part.text is None:
            raise InvalidRequest(f"Missing required parameter: {place}[{index}].text.", param=f"{place}[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)
