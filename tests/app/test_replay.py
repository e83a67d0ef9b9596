"""Who goes on, who is suspect, and how one that kills engines is found among many."""

import math
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.record import Budget, ChoiceRequest, Record
from app.replay import Replay
from app.text.stream import TextStream
from engine.messages import Sampling, Token


def record(sequence: int) -> Record:
    request = ChoiceRequest([1], Sampling(), 100, ())
    return Record(sequence, f"r{sequence}", 0, request, TextStream([b"a"], ()), Budget(1 << 30), "", 0.0)


def get_tokens(records: Collection[Record], replay: Replay) -> None:
    for one in records:
        one.take(Token(one.sequence, 0))
    replay.go_on(records)


def crash(replay: Replay, *at_engine: Record) -> Record | None:
    return replay.interrupt(at_engine, crashed=True)


def submit(*records: Record) -> None:
    for one in records:
        one.submit()


def test_a_request_alone_fails_at_its_third_death_without_a_token() -> None:
    replay, one = Replay(), record(1)
    for _ in range(2):
        submit(one)
        assert crash(replay, one) is None
    assert replay.suspects == {one}
    submit(one)
    assert crash(replay, one) is one
    assert one.resumed == 3


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_token_clears_what_it_had(after: int) -> None:
    replay, one = Replay(), record(1)
    for _ in range(after):
        submit(one)
        assert crash(replay, one) is None
    submit(one)
    get_tokens([one], replay)
    assert not replay.suspects
    for _ in range(2):
        assert crash(replay, one) is None
        submit(one)
    assert crash(replay, one) is one


def test_company_is_no_proof() -> None:
    replay, one, other = Replay(), record(1), record(2)
    for _ in range(5):
        submit(one, other)
        assert crash(replay, one, other) is None
    other.end("cancelled", 1.0, None)
    submit(one)
    assert crash(replay, one, other) is None, "its blocks were still there, and so was its last step"
    submit(one)
    assert crash(replay, one) is one


def test_a_planned_reload_gives_no_strikes() -> None:
    replay, one = Replay(), record(1)
    submit(one)
    crash(replay, one)
    for _ in range(5):
        submit(one)
        assert replay.interrupt([one], crashed=False) is None
    assert one.strikes == 1
    assert not replay.suspects


def test_it_is_over_when_all_have_gone_on_or_ended() -> None:
    replay, told = Replay(), []
    replay.tell_when_over(lambda: told.append("nothing to wait for"))
    assert told == ["nothing to wait for"]
    one, other = record(1), record(2)
    submit(one, other)
    crash(replay, one, other)
    replay.tell_when_over(lambda: told.append("first"))
    get_tokens([one], replay)
    crash(replay, one, other)
    replay.tell_when_over(lambda: told.append("second"))
    submit(one, other)
    get_tokens([one], replay)
    assert replay
    replay.go_on([other])
    assert told == ["nothing to wait for", "second"]
    assert not replay


class World:
    """Requests whose engine dies at the first step with any poison in it, over and over."""

    def __init__(self, count: int, poisons: set[int]) -> None:
        self.replay = Replay()
        self.queue = [record(n) for n in range(count)]
        self.poisons = poisons
        self.guilty: list[int] = []
        self.crashes = 0
        self.at_engine: list[Record] = []

    def feed(self) -> None:
        group = self.replay.next_suspects(self.at_engine) if self.replay.suspects else list(self.queue)
        for one in group:
            self.queue.remove(one)
            self.at_engine.append(one)
            one.submit()

    def run(self) -> None:
        """Until everybody has got a token or is given up."""
        while self.queue or self.replay:
            self.feed()
            if any(one.sequence in self.poisons for one in self.at_engine):
                self.crash()
            else:
                get_tokens(self.at_engine, self.replay)

    def crash(self) -> None:
        self.crashes += 1
        guilty = self.replay.interrupt(self.at_engine, crashed=True)
        self.queue += self.at_engine
        self.at_engine = []
        if guilty is not None:
            guilty.end("failed", 0.0, None)
            self.queue.remove(guilty)
            self.replay.go_on([guilty])
            self.guilty.append(guilty.sequence)


@pytest.mark.parametrize("poison", range(32))
def test_one_among_many_is_found_in_few_crashes(poison: int) -> None:
    world = World(32, {poison})
    world.run()
    assert world.guilty == [poison]
    assert world.crashes <= 2 + math.log2(32) + 1


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=6))
def test_exactly_the_guilty_are_found(count: int, poisons: set[int]) -> None:
    world = World(count, poisons)
    world.run()
    assert sorted(world.guilty) == sorted(poison for poison in poisons if poison < count)
    assert all(one.outcome is None for one in world.at_engine)
