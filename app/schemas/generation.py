"""The parameters that chat and completions share: what is enforced, ignored on purpose, or refused by name.

A field typed `Refused` or `NothingIn` is known from OpenAI's API and not supported yet: null (and an empty list) asks
for nothing and passes, anything else is refused by name, as is every field that is not listed at all.
"""

import secrets
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from app.errors import InvalidRequest, UnsupportedParameter
from engine.messages import Sampling

MAX_CHOICES = 128

Refused: TypeAlias = None
NothingIn: TypeAlias = Annotated[list[object], Meta(max_length=0)] | None
Limit = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=4096)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]

Value = TypeVar("Value")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Refused = None


class GenerationBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both routes take; None stands for the default named in `sampling` and below."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=4)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Limit | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    # local habits beyond OpenAI
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    # ignored on purpose: they concern OpenAI's own records, billing and abuse handling
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def limit(self) -> int | None:
        """Tokens of the answer at most; None: as many as the context has room for."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self, vocabulary: int) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only for stream: true.", param="stream_options")
        if any(not 0 <= token < vocabulary for token in self.logit_bias or ()):
            raise InvalidRequest(f"logit_bias: token ids go from 0 to {vocabulary - 1}.", param="logit_bias")

    def sampling(self, seed: int, choice: int, logprobs: int | None) -> Sampling:
        """How the engine draws; `seed` as `resolved_seed` gave it."""
        return Sampling(
            temperature=_given(self.temperature, 1.0),
            top_k=max(_given(self.top_k, 0), 0),
            top_p=_given(self.top_p, 1.0),
            min_p=_given(self.min_p, 0.0),
            repetition_penalty=_given(self.repetition_penalty, 1.0),
            presence_penalty=_given(self.presence_penalty, 0.0),
            frequency_penalty=_given(self.frequency_penalty, 0.0),
            logit_bias=tuple((self.logit_bias or {}).items()),
            seed=seed,
            choice=choice,
            logprobs=logprobs,
        )

    def resolved_seed(self) -> int:
        """64 bits: the client's (negative ones wrap), or drawn now so that a replay has the same."""
        return secrets.randbits(64) if self.seed is None else self.seed % 2**64


def _given(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def refuse_unless(param: str, nothing_asked: bool) -> None:
    """For parameters whose neutral value is no null: `echo: false` passes, `echo: true` is refused by name."""
    if not nothing_asked:
        raise UnsupportedParameter(param)
