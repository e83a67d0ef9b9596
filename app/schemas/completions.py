"""POST /v1/completions: the body."""

from typing import Annotated

from msgspec import Meta

from app.errors import InvalidRequest
from app.schemas.generation import MAX_CHOICES, GenerationBody, Refused, TopLogprobs, refuse_unless

DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default on this route."""

TokenIds = Annotated[list[int], Meta(min_length=1)]


class CompletionBody(GenerationBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str | Annotated[list[str | int | TokenIds], Meta(min_length=1)]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: Refused = None
    best_of: int | None = None

    @property
    def limit(self) -> int:
        return self.max_tokens or DEFAULT_MAX_TOKENS

    @property
    def prompts(self) -> list[str | list[int]]:
        """A string, strings, token ids, or lists of token ids: as a list of prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt):
            return [self.prompt]  # type: ignore[list-item]
        if not (all(isinstance(item, str) for item in self.prompt) or all(isinstance(i, list) for i in self.prompt)):
            raise InvalidRequest("prompt: all items must be of one kind.", param="prompt")
        return self.prompt  # type: ignore[return-value]

    def check(self, vocabulary: int) -> None:
        super().check(vocabulary)
        refuse_unless("echo", not self.echo)
        refuse_unless("best_of", self.best_of is None or self.best_of == self.choices == 1)
        prompts = self.prompts
        if len(prompts) * self.choices > MAX_CHOICES:
            raise InvalidRequest(f"prompt times n: at most {MAX_CHOICES} choices in one request.", param="n")
        for prompt in prompts:
            if not isinstance(prompt, str) and not 0 <= min(prompt) <= max(prompt) < vocabulary:
                raise InvalidRequest(f"prompt: token ids go from 0 to {vocabulary - 1}.", param="prompt")
