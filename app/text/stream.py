"""Tokens in, text out, at the earliest moment at which it is safe to show.

Everything is matched and cut on bytes. Two things are held back: bytes that may still become a stop string, and the
bytes of a character that is not complete. Joined, the pieces are `data.decode("utf-8", "replace")` of the same bytes
up to the stop, however they were cut into tokens; an incomplete character at the end becomes U+FFFD as it does there.
"""

from codecs import utf_8_decode
from collections import deque
from collections.abc import Sequence

from app.text.stops import stop_matcher


class TextStream:
    """The text of one choice, fed one token at a time.

    Args:
        token_bytes: the bytes that each token adds to the answer, by id (`Tokenizer.text_bytes`).
        stops: stop strings. The one completed first ends the text, before its own first byte; of those completed by
            the same byte, the longest.
        drop_leading_space: leave out one space at the very beginning (`Tokenizer.adds_space`): SentencePiece-style
            vocabularies write the first word of a text with one, and a one-shot decode removes it.
    Raises:
        ValueError: a stop is empty or is not encodable as UTF-8.
    """

    __slots__ = (
        "_fed",
        "_lead",
        "_matcher",
        "_pending",
        "_spans",
        "_state",
        "_tail",
        "_token_bytes",
        "released",
        "stopped",
    )

    def __init__(
        self, token_bytes: Sequence[bytes], stops: Sequence[str | bytes] = (), *, drop_leading_space: bool = False
    ) -> None:
        encoded = tuple(stop.encode() if isinstance(stop, str) else stop for stop in stops)
        self._matcher = stop_matcher(encoded) if encoded else None
        self._token_bytes = token_bytes
        self._lead = drop_leading_space
        self._fed = 0  # bytes seen so far
        self._state = 0
        self._pending = b""  # may still become a stop: as many bytes as the matcher's state is deep
        self._tail = b""  # no stop begins here, but the character is not complete
        self._spans: deque[tuple[int, int]] = deque()  # first byte and end of each token not yet released
        self.stopped = False
        """A stop string was completed; the text is over."""
        self.released = 0
        """How many of the tokens fed make up the text returned so far; log probabilities go out up to here.

        A token counts once its last byte is out. When a stop string matches, a token that has any byte before it
        counts, and one that lies wholly inside or after it never does.
        """

    def feed(self, token: int) -> str:
        """The text that became safe to show with this token, often "". Not to be called once `stopped`."""
        assert not self.stopped, "the text ended with a stop string"
        data = self._token_bytes[token]
        if self._lead and data:
            self._lead = False
            data = data.removeprefix(b" ")
        start = self._fed
        self._fed += len(data)
        if self._matcher is not None:
            self._state, end = self._matcher.scan(self._state, data)
            if end >= 0:
                return self._stop(start, data[:end])
            depth = self._matcher.depth[self._state]
            if depth or self._pending:
                data = self._pending + data
                safe = len(data) - depth
                data, self._pending = data[:safe], data[safe:]
        if not self._spans and not self._pending and data.isascii():  # nothing was held back, nothing is now
            self.released += 1
            return data.decode("ascii")
        self._spans.append((start, self._fed))
        text = self._decode(data, final=False)
        self._release(self._fed - len(self._pending) - len(self._tail))
        return text

    def flush(self) -> str:
        """End of generation: what was held back turned out to be text. "" after a stop string."""
        pending, self._pending = self._pending, b""
        text = self._decode(pending, final=True)
        self._release(self._fed)
        return text

    def _stop(self, start: int, data: bytes) -> str:
        """`data` ends with the byte that completes the stop; `start` is the position of its first byte."""
        assert self._matcher is not None
        self.stopped = True
        self._spans.append((start, self._fed))
        cut = start + len(data) - self._matcher.found[self._state]
        joined = self._pending + data
        self._pending = b""
        text = self._decode(joined[: len(joined) - self._matcher.found[self._state]], final=True)
        self.released += sum(first < cut or end <= cut for first, end in self._spans)
        self._spans.clear()
        self._fed = cut
        return text

    def _decode(self, data: bytes, *, final: bool) -> str:
        data = self._tail + data
        text, used = utf_8_decode(data, "replace", final)
        self._tail = data[used:]
        return text

    def _release(self, sent: int) -> None:
        """Count the tokens whose last byte is among the first `sent`."""
        spans = self._spans
        while spans and spans[0][1] <= sent:
            spans.popleft()
            self.released += 1
