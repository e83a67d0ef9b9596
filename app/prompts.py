"""From messages or text to token ids, off the event loop and within bounds.

A prompt that cannot fit is refused as cheaply as that can be known: by its length in bytes (no token has more than the
longest one), then by its first tokens; a text that is far too long is never tokenized whole.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from app.errors import ContextLengthExceeded, InvalidRequest
from app.text.budget import MAX_OUTPUT_CHARS
from app.text.template import ChatTemplate, TemplateError
from app.text.tokenizer import Tokenizer

EXACT_CONTEXTS = 2
"""A prompt of up to so many contexts is counted to its end before it is refused."""

REFUSAL_CHARS = 300
WORKERS = 2

Result = TypeVar("Result")


class Prompts:
    """The text side of one model. `chat` and `completion` take the context of the engine there is."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._longest = max(1, max(len(token) for token in tokenizer.token_bytes))
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="text")
        self.token_bytes: Sequence[bytes] = tokenizer.token_bytes
        """By id: what the token stands for."""
        self.text_bytes: Sequence[bytes] = tokenizer.text_bytes
        """By id: what it adds to an answer, which is nothing for control tokens."""
        self.vocabulary = tokenizer.vocab_size
        self.stop_ids = tuple(tokenizer.stop_ids)
        self.adds_space = tokenizer.adds_space
        """SentencePiece-style: a text's first word has a space before it that is not the text's."""

    async def chat(self, messages: list[dict[str, Any]], max_context: int) -> list[int]:
        """Raises InvalidRequest when the template refuses the messages, ContextLengthExceeded."""
        if self._template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", code="no_chat_template")
        return await self._run(lambda: self._chat(messages, max_context))

    async def completion(self, prompt: str | list[int], max_context: int) -> list[int]:
        """Token ids are taken as they are. Raises InvalidRequest, ContextLengthExceeded."""
        if isinstance(prompt, str):
            text = prompt
            prompt = await self._run(lambda: self._encode(text, max_context, "prompt"))
        if not prompt:
            raise InvalidRequest("prompt: has no tokens.", param="prompt")
        return _fitting(prompt, max_context, "prompt")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _chat(self, messages: list[dict[str, Any]], max_context: int) -> list[int]:
        assert self._template is not None
        if len(messages) >= max_context:  # each takes a token at least
            raise ContextLengthExceeded(len(messages), max_context, param="messages", at_least=True)
        chars = sum(len(message["content"]) for message in messages)
        if chars > MAX_OUTPUT_CHARS and chars // self._longest >= max_context:  # no template would render so much
            raise ContextLengthExceeded(chars // self._longest, max_context, param="messages", at_least=True)
        try:
            text = self._template.render(messages)
        except TemplateError as error:
            raise InvalidRequest(f"messages: {str(error)[:REFUSAL_CHARS]}", param="messages") from None
        return _fitting(self._encode(text, max_context, "messages"), max_context, "messages")

    def _encode(self, text: str, max_context: int, param: str) -> list[int]:
        least = -(-len(text.encode()) // self._longest)
        if least >= max_context:
            raise ContextLengthExceeded(least, max_context, param=param, at_least=True)
        # A template that writes the token for the beginning itself does not get a second one.
        ids = self._tokenizer.encode(
            text, parse_special=True, add_bos=self._tokenizer.add_bos, limit=EXACT_CONTEXTS * max_context
        )
        if len(ids) > EXACT_CONTEXTS * max_context:
            raise ContextLengthExceeded(len(ids), max_context, param=param, at_least=True)
        return ids


def _fitting(prompt: list[int], max_context: int, param: str) -> list[int]:
    """The prompt, if one token of answer fits behind it."""
    if len(prompt) >= max_context:
        raise ContextLengthExceeded(len(prompt), max_context, param=param)
    return prompt
