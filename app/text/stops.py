"""Stop strings as one automaton over bytes (Aho and Corasick, 1975).

The state after any number of bytes is the longest suffix of them that is a prefix of some stop, so its depth is
exactly what has to be held back: not a byte more could still become a stop, not a byte less.
"""

import re
from collections import deque
from collections.abc import Iterable
from functools import lru_cache


class StopMatcher:
    """Finds the stop that is completed first; of those completed by the same byte, the longest.

    "Completed first" does not depend on what comes later, so the answer is the same for any cutting of the bytes into
    tokens, and is known at the earliest moment. Immutable once built: one matcher serves any number of streams.
    """

    __slots__ = ("_fail", "_first", "_goto", "depth", "found")

    def __init__(self, stops: Iterable[bytes]) -> None:
        self._goto: dict[int, int] = {}  # state * 256 + byte → state
        self._fail = [0]
        self.depth = [0]
        """By state: how many of the last bytes are the beginning of a stop."""
        self.found = [0]
        """By state: length of the longest stop that ends here, 0 for none."""
        for stop in stops:
            if not stop:
                raise ValueError("a stop string must not be empty")
            self._insert(stop)
        self._link()
        first = bytes(key for key in self._goto if key < 256)
        self._first = re.compile(b"[" + re.escape(first) + b"]") if first else None

    def _insert(self, stop: bytes) -> None:
        state = 0
        for byte in stop:
            key = state << 8 | byte
            following = self._goto.get(key)
            if following is None:
                following = self._goto[key] = len(self.depth)
                self.depth.append(self.depth[state] + 1)
                self.found.append(0)
                self._fail.append(0)
            state = following
        self.found[state] = len(stop)

    def _link(self) -> None:
        """Failure links in order of depth: where to go on when the next byte does not fit."""
        children: dict[int, list[tuple[int, int]]] = {}
        for key, following in self._goto.items():
            children.setdefault(key >> 8, []).append((key & 255, following))
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for byte, following in children.get(state, ()):
                queue.append(following)
                if state:
                    self._fail[following] = self.step(self._fail[state], byte)
                self.found[following] = self.found[following] or self.found[self._fail[following]]

    def step(self, state: int, byte: int) -> int:
        goto, fail = self._goto, self._fail
        while (following := goto.get(state << 8 | byte)) is None:
            if not state:
                return 0
            state = fail[state]
        return following

    def scan(self, state: int, data: bytes) -> tuple[int, int]:
        """(state after `data`, -1), or (state, end) where data[:end] completes the first stop."""
        start = 0
        if not state:  # the common case: nothing pending, and no byte of this token begins a stop
            match = self._first.search(data) if self._first else None
            if match is None:
                return 0, -1
            start = match.start()
        step, found = self.step, self.found
        for position in range(start, len(data)):
            state = step(state, data[position])
            if found[state]:
                return state, position + 1
        return state, -1


@lru_cache(maxsize=64)
def stop_matcher(stops: tuple[bytes, ...]) -> StopMatcher:
    """The matcher of these stops; clients send the same few again and again, and all choices of a request share one."""
    return StopMatcher(stops)
