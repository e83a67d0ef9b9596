"""TextStream against an obvious reference, over random bytes, cuttings and stops."""

from codecs import getincrementaldecoder

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.stops import StopMatcher
from app.text.stream import TextStream

# A small alphabet, so that stops, near-misses and broken characters really happen; é is c3 a9, 日 is e6 97 a5,
# 😀 is f0 9f 98 80, ed a0 80 a surrogate, ff never valid.
PIECES = [
    b"a",
    b"b",
    b" ",
    b"\n",
    "é".encode(),
    "日".encode(),
    "😀".encode(),
    b"\xed\xa0\x80",
    b"\xff",
    b"\xe6",
    b"\x97",
]
raw_bytes = st.lists(st.sampled_from(PIECES), max_size=24).map(b"".join)
text_stops = st.text(alphabet="ab \né日😀", min_size=1, max_size=5)
byte_stops = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map(b"".join)
stop_sets = st.lists(text_stops | byte_stops, max_size=4)


def as_bytes(stops: list[str | bytes]) -> list[bytes]:
    return [stop.encode() if isinstance(stop, str) else stop for stop in stops]


def cut_of(data: bytes, stops: list[str | bytes]) -> int:
    """Where the text ends: before the stop that is completed first, the longest of those completed together."""
    for end in range(1, len(data) + 1):
        lengths = [len(stop) for stop in as_bytes(stops) if data[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return len(data)


def play(tokens: list[bytes], stops: list[str | bytes], **options: bool) -> tuple[list[str], TextStream]:
    """The pieces a stream gives, flush included; tokens after the stop are not fed."""
    stream = TextStream(tokens, stops, **options)
    pieces = []
    for token in range(len(tokens)):
        pieces.append(stream.feed(token))
        if stream.stopped:
            break
    pieces.append(stream.flush())
    return pieces, stream


@st.composite
def tokenised(draw: st.DrawFn) -> list[bytes]:
    """Random bytes cut at random places; some tokens are empty, as control tokens are."""
    data = draw(raw_bytes)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@settings(max_examples=500)
@given(tokenised(), stop_sets)
def test_joined_text_is_the_one_shot_decode_up_to_the_first_stop(tokens, stops):
    data = b"".join(tokens)
    cut = cut_of(data, stops)
    pieces, stream = play(tokens, stops)
    assert "".join(pieces) == data[:cut].decode("utf-8", "replace")
    assert stream.stopped == (cut < len(data))


@settings(max_examples=300)
@given(tokenised(), stop_sets)
def test_after_every_token_all_that_is_safe_is_out_and_nothing_else(tokens, stops):
    """Safe: all bytes but the longest beginning of a stop, and of those all but an incomplete character."""
    stream = TextStream(tokens, stops)
    seen, shown = b"", ""
    for token, data in enumerate(tokens):
        shown += stream.feed(token)
        seen += data
        if stream.stopped:
            return
        held = max((n for stop in as_bytes(stops) for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        decoder = getincrementaldecoder("utf-8")("replace")
        assert shown == decoder.decode(seen[: len(seen) - held])
        unsent = held + len(decoder.getstate()[0])
        ends = [len(b"".join(tokens[: n + 1])) for n in range(token + 1)]
        assert stream.released == sum(end <= len(seen) - unsent for end in ends)


@settings(max_examples=300)
@given(tokenised(), stop_sets)
def test_released_tokens_are_those_with_a_byte_before_the_stop(tokens, stops):
    data = b"".join(tokens)
    cut = cut_of(data, stops)
    _, stream = play(tokens, stops)
    starts = [len(b"".join(tokens[:n])) for n in range(len(tokens))]
    before = [start < cut or start + len(token) <= cut for start, token in zip(starts, tokens, strict=True)]
    if stream.stopped:
        fed = next(
            n for n in range(1, len(tokens) + 1) if cut_of(b"".join(tokens[:n]), stops) < len(b"".join(tokens[:n]))
        )
        assert stream.released == sum(before[:fed])
    else:
        assert stream.released == len(tokens)


def test_ascii_passes_at_once():
    pieces, stream = play([b"Hello", b",", b" world"], [])
    assert pieces == ["Hello", ",", " world", ""]
    assert stream.released == 3


def test_a_character_comes_whole():
    pieces, _ = play([b"x\xe6", b"\x97", b"\xa5y"], [])
    assert pieces == ["x", "", "日y", ""]


def test_an_incomplete_end_becomes_one_replacement_character():
    pieces, stream = play([b"ok\xf0\x9f", b"\x98"], [])
    assert pieces == ["ok", "", "\ufffd"]
    assert stream.released == 2


def test_a_beginning_of_a_stop_is_held_back_and_released_when_refuted():
    pieces, _ = play([b"one\nHu", b"man", b"ity"], ["\nHuman:"])
    assert pieces == ["one", "", "\nHumanity", ""]


def test_a_beginning_of_a_stop_is_text_when_generation_ends():
    pieces, stream = play([b"one\nHu", b"man"], ["\nHuman:"])
    assert pieces == ["one", "", "\nHuman"]
    assert stream.released == 2


def test_only_the_part_that_can_still_match_stays_back():
    """After "aab" refutes "aaa", no more than the shorter beginning is kept."""
    pieces, _ = play([b"a", b"a", b"b", b"a"], ["aaa", "bab"])
    assert pieces == ["", "", "aa", "", "ba"]


def test_a_stop_across_tokens_and_characters_never_leaks():
    pieces, stream = play([b"end", "é".encode()[:1], "é".encode()[1:] + "日".encode()[:2], "日".encode()[2:]], ["dé日"])
    assert pieces == ["en", "", "", "", ""]
    assert stream.stopped
    assert stream.released == 1


def test_the_stop_completed_first_wins():
    assert "".join(play([b"xabcd"], ["abcd", "bc"])[0]) == "xa"
    assert "".join(play([b"x", b"a", b"b", b"c", b"d"], ["abcd", "bc"])[0]) == "xa"


def test_of_stops_completed_together_the_longest_wins():
    assert "".join(play([b"xabc"], ["c", "abc", "bc"])[0]) == "x"


def test_one_leading_space_is_dropped_when_asked_also_after_an_empty_token():
    assert play([b"", b"  Hi", b" you"], [], drop_leading_space=True)[0] == ["", " Hi", " you", ""]
    assert play([b"Hi", b" you"], [], drop_leading_space=True)[0] == ["Hi", " you", ""]
    assert play([b" Hi"], [])[0] == [" Hi", ""]


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream([b"a"], [""])


def test_feeding_after_the_stop_is_a_bug_of_the_caller():
    _, stream = play([b"a#b"], ["#"])
    assert stream.flush() == ""
    with pytest.raises(AssertionError):
        stream.feed(0)


def test_a_long_stop_of_one_letter_stays_linear():
    """Failure links keep the work per byte constant on average; a naive search would need 10^10 comparisons."""
    matcher = StopMatcher([b"a" * 100_000 + b"b"])
    state, end = matcher.scan(0, b"a" * 300_000)
    assert (matcher.depth[state], end) == (100_000, -1)
