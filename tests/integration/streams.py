"""Many streams of one service at once, with something done to it at a moment of theirs, against undisturbed ones."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.served import Answer, Served

GREEDY, SEEDED = 32, 8
PATIENCE_S = 100.0

Act = Callable[[], None]


class Load:
    """32 streams at temperature 0 and 8 seeded ones, with prompts of different lengths and a common beginning.

    They begin as fast as the service takes them, so moments of the first tokens are moments of prefill too.
    """

    def __init__(self, served: Served, tokens: int, prompt_words: int = 40) -> None:
        self.served = served
        self.tokens = tokens
        self._words = prompt_words
        self.twin = [(answer.text, answer.finish) for answer in self.run()]
        self.events = sum(len(answer.arrivals) for answer in self._answers)

    def run(self, *acts: tuple[int, Act], users: Sequence[str | None] = ()) -> list[Answer]:
        """All streams to their ends. Each act comes when so many events of all of them together have come."""
        self._answers = answers = [Answer() for _ in range(GREEDY + SEEDED)]
        users = [*users, *[None] * (len(answers) - len(users))]
        with ThreadPoolExecutor(len(answers)) as pool:
            asked = [
                pool.submit(self.served.chat, self._prompt(number), answer, **self._body(number, users[number]))
                for number, answer in enumerate(answers)
            ]
            for count, act in sorted(acts, key=lambda pair: pair[0]):
                while self.come < count and not all(future.done() for future in asked):
                    time.sleep(0.001)
                act()
            for future in asked:
                future.result(PATIENCE_S)
        return answers

    def check(self, answers: Sequence[Answer]) -> None:
        """Nothing lost, nothing twice, no other text."""
        assert [answer.whole for answer in answers] == [True] * len(answers)
        assert [(answer.text, answer.finish) for answer in answers] == self.twin
        assert self.served.vram()["queue"]["lost"] == 0

    @property
    def come(self) -> int:
        """Events so far."""
        return sum(len(answer.arrivals) for answer in self._answers)

    def moment(self, random_: random.Random) -> int:
        """Any, from before the first token on; so early that there are streams left to be cut."""
        return random_.randrange(self.events * 9 // 10)

    def _prompt(self, number: int) -> str:
        return f"{'word ' * (1 + number % 7 * self._words // 6)}and {number}"

    def _body(self, number: int, user: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {"stream": True, "max_tokens": self.tokens, "temperature": 0}
        if number >= GREEDY:
            body |= {"temperature": 1.0, "top_p": 0.9, "seed": number}
        return body if user is None else {**body, "user": user}


def kill(served: Served) -> None:
    """kill -9 of the engine that serves."""
    os.kill(served.engines()[0], signal.SIGKILL)


def settled(served: Served, generation: int = 1) -> dict[str, Any]:
    """/admin/vram once an engine of this generation or a later one serves, and no reload is under way."""
    return until(
        served, lambda shown: not shown["reload"]["in_progress"] and shown["reload"]["generation"] >= generation
    )


def until(served: Served, holds: Callable[[dict[str, Any]], bool], patience_s: float = PATIENCE_S) -> dict[str, Any]:
    """/admin/vram once it is so."""
    end = time.monotonic() + patience_s
    while True:
        shown = served.vram()
        if holds(shown):
            return shown
        assert time.monotonic() < end, shown
        time.sleep(0.05)


@contextmanager
def in_background(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()
