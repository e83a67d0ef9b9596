"""Whether an engine that has work has stopped working.

It has when no step has come for a time that depends on what it is doing: 20 times the longest step of that kind that
was ever seen here, and never less than `--hang-seconds`. Time in which this service itself was stopped or starved does
not count: the engine's steps may have been waiting in the socket.
"""

from engine.messages import StepStats

SLOWNESS = 20


class HangWatch:
    """Fed with every step, and asked by a timer every `tick_s`. What it learned outlives an engine."""

    def __init__(self, hang_s: float, tick_s: float, largest_chunk: int) -> None:
        """`largest_chunk` is how many prompt tokens one step may take at most."""
        self._hang_s = hang_s
        self._tick_s = tick_s
        self._largest_chunk = largest_chunk
        self._looked_at: float | None = None
        self._silent_s = 0.0
        self._longest_decode_s: float | None = None
        self._longest_prefill_s: float | None = None
        self._prefill_token_s: float | None = None
        """Of the slowest prompt token."""

    def step(self, stats: StepStats) -> None:
        """The engine has done a step."""
        self._silent_s = 0.0
        if stats.prefill_tokens:
            self._longest_prefill_s = max(self._longest_prefill_s or 0.0, stats.seconds)
            self._prefill_token_s = max(self._prefill_token_s or 0.0, stats.seconds / stats.prefill_tokens)
        elif stats.decode_rows:
            self._longest_decode_s = max(self._longest_decode_s or 0.0, stats.seconds)

    def begin(self) -> None:
        """Another engine, which has been silent for no time."""
        self._silent_s = 0.0

    def look(self, now: float, *, busy: bool, prefill_tokens: int) -> float | None:
        """The seconds of silence after which an engine with such work has stopped, once it has; else None.

        `prefill_tokens` is the longest text that it may be computing from its beginning.
        """
        since = self._tick_s if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if not busy:
            self._silent_s = 0.0
            return None
        self._silent_s += since if since <= 2 * self._tick_s else self._tick_s
        limit_s = self.limit_s(prefill_tokens)
        return limit_s if self._silent_s > limit_s else None

    def limit_s(self, prefill_tokens: int) -> float:
        """How long no step may come. While nothing of the kind has been seen, the machine may be of any speed."""
        longest_s = self._longest_prefill(prefill_tokens) if prefill_tokens else self._longest_decode_s
        return SLOWNESS * self._hang_s if longest_s is None else max(self._hang_s, SLOWNESS * longest_s)

    def _longest_prefill(self, tokens: int) -> float | None:
        """A longer chunk takes longer than those that were seen: in proportion, or as so many steps of decode."""
        token_s = self._prefill_token_s if self._prefill_token_s is not None else self._longest_decode_s
        if token_s is None:
            return None
        return max(self._longest_prefill_s or 0.0, token_s * min(tokens, self._largest_chunk))
