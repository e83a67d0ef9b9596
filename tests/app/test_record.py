import pytest

from app.record import TOKEN_BYTES, Budget, ChoiceRequest, Record, prompt_bytes
from app.text.stream import TextStream
from engine.messages import Sampling, Token

WORDS = [b"stop", b"Hello", b" wor", b"ld", b"\xe2\x82", b"\xac", b"!", b""]
STOP_ID = 0


def record(*, stops: tuple[str, ...] = (), logprobs: int | None = None, budget: Budget | None = None) -> Record:
    request = ChoiceRequest([1, 2, 3], Sampling(logprobs=logprobs), 10, (STOP_ID,), stops)
    return Record(5, "req-1", 0, request, TextStream(WORDS, stops), budget or Budget(10**9), "scope", 100.0)


def take(made: Record, *tokens: int, last: str | None = None) -> str | None:
    finish = None
    for place, token in enumerate(tokens):
        ends = last if place == len(tokens) - 1 else None
        finish = made.take(Token(5, token, ends, -1.0, [(token, -1.0)]))
    return finish


def text_of(made: Record) -> str:
    event = made.drain()
    return "" if event is None else event.text


def test_pieces_are_joined_until_they_are_taken() -> None:
    made = record()
    take(made, 1, 2)
    event = made.drain()
    assert event is not None
    assert (event.index, event.text, event.tokens, event.finish) == (0, "Hello wor", [], None)
    assert made.drain() is None
    take(made, 4)
    assert made.drain() is None, "half a character is no news"
    take(made, 5)
    assert text_of(made) == "€"


def test_a_stop_id_is_counted_and_not_shown() -> None:
    made = record()
    assert take(made, 1, STOP_ID, last="stop") == "stop"
    assert text_of(made) == "Hello"
    assert made.generated_ids == [1, STOP_ID]


def test_a_stop_string_ends_here_whatever_the_engine_says() -> None:
    made = record(stops=("world",))
    assert take(made, 1, 2) is None
    assert text_of(made) == "Hello "
    assert take(made, 3, last="length") == "stop"
    assert text_of(made) == ""
    assert made.generated_ids == [1, 2, 3]


def test_the_limit_releases_what_was_held_back() -> None:
    made = record(stops=("world",))
    assert take(made, 1, 2, last="length") == "length"
    assert text_of(made) == "Hello wor"
    made = record()
    take(made, 1, 4, last="length")
    assert text_of(made) == "Hello\ufffd"


def test_log_probabilities_belong_to_the_text_beside_them() -> None:
    made = record(stops=("world",), logprobs=1)
    take(made, 1, 2)
    event = made.drain()
    assert event is not None
    assert [info.token for info in event.tokens] == [1], "the second token is half held back"
    take(made, 3)
    made.end("stop", 1.0, None)
    event = made.drain()
    assert event is not None
    assert ([info.token for info in event.tokens], event.text) == ([2], "")
    assert event.tokens[0].logprob == -1.0
    assert event.tokens[0].top == [(2, -1.0)]


def test_log_probabilities_of_a_whole_answer() -> None:
    made = record(logprobs=1)
    take(made, 4, 5, 1, 7, 6, STOP_ID, last="stop")
    event = made.drain()
    assert event is not None
    assert event.text == "€Hello!"
    assert [info.token for info in event.tokens] == [4, 5, 1, 7, 6]


def test_the_end_is_told_once() -> None:
    made = record()
    take(made, 1, last="length")
    made.end("length", 7.0, None)
    event = made.drain()
    assert event is not None
    assert event.finish == "length"
    assert made.drain() is None
    assert (made.finish_reason, made.finished_at) == ("length", 7.0)


def test_it_ends_once() -> None:
    made = record()
    made.end("cancelled", 7.0, None)
    with pytest.raises(AssertionError, match="ended twice: cancelled, stop"):
        made.end("stop", 8.0, None)
    assert made.drain() is None, "nobody is told of a cancellation"
    assert made.finish_reason is None


def test_the_message_that_resumes_it() -> None:
    made = record()
    take(made, 1, 2)
    message = made.submit()
    assert message.prompt_ids == [1, 2, 3]
    assert message.generated_ids == [1, 2]
    assert (message.sequence, message.max_tokens, message.stop_ids, message.cache_scope) == (5, 10, (0,), "scope")


@pytest.mark.parametrize("leave", [Record.drain, Record.discard])
def test_unsent_output_is_held_until_it_is_taken_or_given_up(leave: object) -> None:
    budget = Budget(10**9)
    made = record(budget=budget, logprobs=1)
    take(made, 1)
    first = budget.used
    assert first > len("Hello")
    take(made, 2)
    assert budget.used > first
    leave(made)  # type: ignore[operator]
    assert budget.used == 0


def test_a_prompt_shared_by_choices_costs_once() -> None:
    shared = [1] * 1000
    one = prompt_bytes([ChoiceRequest(shared, Sampling(), 1, ())])
    two = prompt_bytes([ChoiceRequest(shared, Sampling(), 1, ())] * 2)
    apart = prompt_bytes([ChoiceRequest(shared, Sampling(), 1, ()), ChoiceRequest([1] * 1000, Sampling(), 1, ())])
    assert apart - two == 1000 * TOKEN_BYTES
    assert two - one < 1000 * TOKEN_BYTES
