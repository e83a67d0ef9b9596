from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import HandshakeError
from engine.framing import TO_ENGINE, TO_SERVICE, FrameReader, FrameSplitter, encode
from engine.messages import (
    MAX_FRAME_BYTES,
    SCHEMA,
    Cancel,
    Failed,
    Heartbeat,
    Hello,
    LoadFailed,
    LoadProgress,
    Ready,
    Sampling,
    Step,
    StepStats,
    Stop,
    Submit,
    ToEngine,
    Token,
    ToService,
    Welcome,
)

STATS = StepStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0.25)
FROM_SERVICE: list[ToEngine] = [
    Hello("b" * 16, SCHEMA, 3, EngineConfig(model_path="/m.gguf", max_context=77), 9),
    Submit(1, [1, 2, 3], [4], Sampling(seed=2**63, logit_bias=((5, -1.5),)), 10, (2, 7), cache_scope="k"),
    Cancel([1, 2]),
    Stop(),
]
FROM_ENGINE: list[ToService] = [
    Welcome("b" * 16, SCHEMA, 123),
    LoadProgress("weights", 1, 2),
    Ready("cpu", 8192, 64, "f32", 100, 1 << 40, 1 << 30, 0.5),
    LoadFailed("ModelFileError", "x"),
    Step(4, [Token(1, 2, "stop", -0.5, [(2, -0.5), (3, -1.5)]), Token(2, 3)], [(1, 64)], [1], STATS),
    Failed(3, "poison", "why"),
    Heartbeat(4, True, 0.5),
]


@pytest.mark.parametrize(("messages", "decoder"), [(FROM_SERVICE, TO_ENGINE), (FROM_ENGINE, TO_SERVICE)])
def test_every_message_survives(messages: list[ToEngine | ToService], decoder: object) -> None:
    reader: FrameReader[object] = FrameReader(decoder, 3)  # type: ignore[arg-type]
    assert reader.feed(b"".join(encode(3, message) for message in messages)) == messages


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=12))
def test_the_cutting_of_the_stream_does_not_matter(cuts: list[int]) -> None:
    data = b"".join(encode(3, message) for message in FROM_ENGINE)
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    reader = FrameReader(TO_SERVICE, 3)
    parts = [reader.feed(data[start:end]) for start, end in pairwise(places)]
    assert [message for part in parts for message in part] == FROM_ENGINE


def test_frames_of_another_generation_are_dropped() -> None:
    reader = FrameReader(TO_SERVICE, 3)
    frames = [encode(generation, Heartbeat(generation, False, 0.0)) for generation in (2, 3, 4, 3)]
    assert [message.step for message in reader.feed(b"".join(frames)) if isinstance(message, Heartbeat)] == [3, 3]


def test_a_torn_frame_never_becomes_a_message() -> None:
    whole = encode(3, FROM_ENGINE[4])
    for end in range(len(whole)):
        assert FrameReader(TO_SERVICE, 3).feed(whole[:end]) == []


def test_a_frame_that_does_not_parse_is_an_error() -> None:
    for payload in (b"abc", b"\x92\x03\x80", b"\xc1"):
        with pytest.raises(HandshakeError, match="does not parse"):
            FrameReader(TO_SERVICE, 3).feed(len(payload).to_bytes(4, "little") + payload)


def test_a_message_of_the_other_direction_is_an_error() -> None:
    with pytest.raises(HandshakeError):
        FrameReader(TO_ENGINE, 3).feed(encode(3, FROM_ENGINE[0]))


def test_the_size_of_a_frame_is_bounded_by_its_header_alone() -> None:
    splitter = FrameSplitter()
    assert splitter.feed((MAX_FRAME_BYTES).to_bytes(4, "little")) == []
    with pytest.raises(HandshakeError, match="over the limit"):
        FrameSplitter().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
