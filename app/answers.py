"""How an answer is written: OpenAI's objects, whole and as stream chunks, for chat and for completions.

A chunk is three pieces around the text: what comes before it never changes within a stream, so it is encoded once, and
only the text is escaped for each token. Both forms of an answer are made here from the same events, so that they agree.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from app.generation import Usage
from app.prompts import Prompts
from app.record import ChoiceEvent, Record, TokenInfo

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""OpenAI's figure for a token that is as good as impossible; JSON has no -inf."""


@dataclass(slots=True)
class Transcript:
    """One choice of a plain answer, as it adds up."""

    text: list[str] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    finish: str | None = None

    def add(self, event: ChoiceEvent) -> None:
        self.text.append(event.text)
        self.tokens.extend(event.tokens)
        self.finish = event.finish or self.finish


def usage_of(records: Sequence[Record], per_prompt: int) -> Usage:
    """Usage of a request whose `records` are `per_prompt` choices of each of its prompts, which counts once."""
    firsts = records[::per_prompt]
    return Usage(
        prompt_tokens=sum(len(record.prompt_ids) for record in firsts),
        completion_tokens=sum(len(record.generated_ids) for record in records),
        cached_tokens=sum(record.cached_tokens or 0 for record in firsts),
    )


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Answer:
    """One answer to one request; the subclasses say where in the object the text is."""

    stream_object: str
    plain_object: str
    before_text: bytes
    after_text: bytes
    finishing: bytes
    """What stands between index and finish_reason in the chunk that ends a choice."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        choices: int,
        prompts: Prompts,
        *,
        logprobs: bool,
        include_usage: bool,
    ) -> None:
        self._identity = {"id": answer_id, "created": created, "model": model}
        self._token_bytes = prompts.token_bytes
        self._text_bytes = prompts.text_bytes
        self._logprobs = logprobs
        self._include_usage = include_usage
        head = encode({**self._identity, "object": self.stream_object})[:-1]
        self._heads = [b'data: %b,"choices":[{"index":%d,' % (head, index) for index in range(choices)]
        self._text_heads = [head + self.before_text for head in self._heads]
        self._no_choices = b'data: %b,"choices":[],"usage":' % head
        self._end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._text_end = self.after_text + b'null,"finish_reason":null}]' + self._end

    def opening(self) -> bytes:
        """Chunks before the first text."""
        return b""

    def chunks(self, events: Iterable[ChoiceEvent]) -> bytes:
        """One chunk for each event with text, one for each end; joined for a single write."""
        parts: list[bytes] = []
        for event in events:
            index = event.index
            if event.text or event.tokens:
                parts.append(self._text_heads[index])
                parts.append(encode(event.text))
                if self._logprobs:
                    parts.append(self.after_text + encode(self.logprobs(index, event.tokens)))
                    parts.append(b',"finish_reason":null}]' + self._end)
                else:
                    parts.append(self._text_end)
            if event.finish is not None:
                parts.append(self._heads[index] + self.finishing)
                parts.append(b'"%b"}]%b' % (event.finish.encode(), self._end))
        return b"".join(parts)

    def closing(self, usage: Usage) -> bytes:
        """The usage, if it was asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        return self._no_choices + encode(usage_json(usage)) + b"}\n\n" + DONE

    def silence(self, index: int) -> bytes:
        """A chunk in which one choice says nothing, for `--sse-keepalive chunk`."""
        return self._text_heads[index] + b'""' + self._text_end

    def whole(self, transcripts: Sequence[Transcript], usage: Usage) -> bytes:
        choices = [self.choice(index, transcript) for index, transcript in enumerate(transcripts)]
        return encode(
            {**self._identity, "object": self.plain_object, "choices": choices, "usage": usage_json(usage)},
        )

    def choice(self, index: int, transcript: Transcript) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, index: int, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        """Of tokens that follow those of the last call for the same choice."""
        raise NotImplementedError


class ChatAnswer(Answer):
    stream_object = "chat.completion.chunk"
    plain_object = "chat.completion"
    before_text = b'"delta":{"content":'
    after_text = b'},"logprobs":'
    finishing = b'"delta":{},"logprobs":null,"finish_reason":'

    def opening(self) -> bytes:
        role = b'"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}]'
        return b"".join(head + role + self._end for head in self._heads)

    def choice(self, index: int, transcript: Transcript) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(transcript.text), "refusal": None},
            "logprobs": self.logprobs(index, transcript.tokens) if self._logprobs else None,
            "finish_reason": transcript.finish,
        }

    def logprobs(self, index: int, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        content = [
            {
                **self._entry(info.token, info.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in info.top or ()],
            }
            for info in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self._token_bytes[token]
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionAnswer(Answer):
    stream_object = "text_completion"
    plain_object = "text_completion"
    before_text = b'"text":'
    after_text = b',"logprobs":'
    finishing = b'"text":"","logprobs":null,"finish_reason":'

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets = [0] * len(self._heads)

    def choice(self, index: int, transcript: Transcript) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(transcript.text),
            "logprobs": self.logprobs(index, transcript.tokens) if self._logprobs else None,
            "finish_reason": transcript.finish,
        }

    def logprobs(self, index: int, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        """The older shape: parallel lists, offsets in characters of this answer's text."""
        offsets = []
        for info in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += _characters(self._text_bytes[info.token])
        tops = [{self._name(token): _finite(value) for token, value in info.top or ()} for info in tokens]
        return {
            "tokens": [self._name(info.token) for info in tokens],
            "token_logprobs": [_finite(info.logprob) for info in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """OpenAI's way to tell apart tokens that are no whole characters."""
        raw = self._token_bytes[token]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float | None) -> float:
    assert logprob is not None, "log probabilities were asked for"
    return max(logprob, LEAST_LOGPROB)


def _characters(raw: bytes) -> int:
    """Characters that begin in `raw`: its bytes other than UTF-8 continuation bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)
