"""The record of one choice: everything needed to say its text, to account for it, and to run it again.

The engine may die at any moment; the record does not. `prompt_ids` and `generated_ids` are kept apart for good, so
that limits, penalties and noise go on over `generated_ids` in the next engine. A record ends exactly once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Literal

import msgspec

from app.errors import ApiError
from app.text.stream import TextStream
from engine.messages import Sampling, Submit, Token

Outcome = Literal["stop", "length", "cancelled", "failed"]
Finish = Literal["stop", "length"]

RECORD_BYTES = 2048
"""What a record costs before it holds anything (measured: objects, text stream, queue entries)."""

TOKEN_BYTES = 40
"""One id in a list of ids: the slot and the number."""


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """What one choice is asked to be, with nothing left to decide: `sampling` has its seed and choice index."""

    prompt_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    stops: tuple[str, ...] = ()
    cache_prompt: bool = True
    drop_leading_space: bool = False
    """The answer does not go on in the middle of the prompt's line: its first word's space is left out."""


class TokenInfo(msgspec.Struct, frozen=True):
    """Log probabilities of one token of the answer: its own, and those of the likeliest (id, logprob)."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]] | None


class ChoiceEvent(msgspec.Struct, frozen=True):
    """What is new of one choice. `tokens` (empty unless log probabilities were asked for) make up the text so far."""

    index: int
    text: str
    tokens: list[TokenInfo]
    finish: Finish | None


class Budget:
    """Bytes held for requests: bodies, records, unsent output."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Record:
    """One choice of one request, from its admission to its end. Times are `time.monotonic()` seconds."""

    __slots__ = (
        "_budget",
        "_infos",
        "_parts",
        "_sent_infos",
        "_told",
        "_unsent_bytes",
        "_wants_infos",
        "admitted_at",
        "cache_scope",
        "cached_tokens",
        "failure",
        "finished_at",
        "first_token_at",
        "generated_ids",
        "index",
        "last_token_at",
        "longest_gap_s",
        "outcome",
        "prompt_ids",
        "request",
        "request_id",
        "resumed",
        "sequence",
        "submitted_at",
        "text",
    )

    def __init__(
        self,
        sequence: int,
        request_id: str,
        index: int,
        request: ChoiceRequest,
        text: TextStream,
        budget: Budget,
        cache_scope: str,
        now: float,
    ) -> None:
        self.sequence = sequence
        self.request_id = request_id
        self.index = index
        self.request = request
        self.prompt_ids = request.prompt_ids
        self.generated_ids: list[int] = []
        self.text = text
        self.cache_scope = cache_scope
        self.outcome: Outcome | None = None
        self.failure: ApiError | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when it first started; a resumption does not change them."""
        self.resumed = 0
        """How many engines were lost under it."""
        self.admitted_at = now
        self.submitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None
        self.longest_gap_s = 0.0
        self._budget = budget
        self._wants_infos = request.sampling.logprobs is not None
        self._parts: list[str] = []
        self._infos: list[TokenInfo] = []
        self._sent_infos = 0
        self._unsent_bytes = 0
        self._told = False

    @property
    def finish_reason(self) -> Finish | None:
        return self.outcome if self.outcome == "stop" or self.outcome == "length" else None

    def submit(self) -> Submit:
        """The message that starts this choice, or lets it go on in another engine."""
        request = self.request
        return Submit(
            sequence=self.sequence,
            prompt_ids=self.prompt_ids,
            generated_ids=self.generated_ids,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            cache_prompt=request.cache_prompt,
            cache_scope=self.cache_scope,
        )

    def take(self, token: Token) -> Finish | None:
        """Account one token of the engine; tells whether the answer is complete with it.

        A stop id is counted and not shown. A stop string ends the answer here although the engine knows nothing of
        it, also when the limit on tokens was met by the same token.
        """
        self.generated_ids.append(token.token)
        finish = token.finish
        if finish == "stop":
            text = self.text.flush()
        else:
            if self._wants_infos:
                self._keep_info(token)
            text = self.text.feed(token.token)
            if self.text.stopped:
                finish = "stop"
            elif finish is not None:
                text += self.text.flush()
        if text:
            self._parts.append(text)
            self._hold(getsizeof(text))
        return finish  # type: ignore[return-value]  # the engine's "stop" and "length" are these

    def end(self, outcome: Outcome, now: float, failure: ApiError | None) -> None:
        assert self.outcome is None, f"sequence {self.sequence} ended twice: {self.outcome}, {outcome}"
        self.outcome = outcome
        self.failure = failure if outcome == "failed" else None
        self.finished_at = now

    def drain(self) -> ChoiceEvent | None:
        """Everything new since the last call, as one event; None when there is nothing."""
        finish = None
        if self.outcome is not None and not self._told:
            self._told = True
            finish = self.finish_reason
        parts = self._parts
        if not parts and finish is None:
            return None
        self._parts = []
        self._budget.used -= self._unsent_bytes
        self._unsent_bytes = 0
        text = parts[0] if len(parts) == 1 else "".join(parts)
        return ChoiceEvent(self.index, text, self._drain_infos() if self._wants_infos else [], finish)

    def discard(self) -> None:
        """Give up all output that was not drained."""
        self._parts = []
        self._infos = []
        self._budget.used -= self._unsent_bytes
        self._unsent_bytes = 0

    def _keep_info(self, token: Token) -> None:
        self._infos.append(TokenInfo(token.token, token.logprob, token.top))
        self._hold(200 + 120 * len(token.top or ()))

    def _drain_infos(self) -> list[TokenInfo]:
        """Those of the tokens that are wholly in the text drained so far; a token cut by a stop is not among them."""
        count = self.text.released - self._sent_infos
        self._sent_infos += count
        infos, self._infos = self._infos[:count], self._infos[count:]
        return infos

    def _hold(self, amount: int) -> None:
        self._unsent_bytes += amount
        self._budget.used += amount


def prompt_bytes(choices: Sequence[ChoiceRequest]) -> int:
    """What the records of one request cost at their admission; choices that share a list of ids share its cost."""
    lists = {id(choice.prompt_ids): len(choice.prompt_ids) for choice in choices}
    return RECORD_BYTES * len(choices) + TOKEN_BYTES * sum(lists.values())
