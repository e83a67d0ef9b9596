"""Frames of the socket pair: a little-endian u32 length, then msgpack `[generation, message]`.

One `FrameReader` per connection turns received bytes into messages. A frame that is not whole yet waits in its buffer,
and is dropped with it when the peer dies; a whole frame of another generation is dropped at once.
"""

import struct
from typing import Generic, TypeVar

import msgspec

from engine.errors import HandshakeError
from engine.messages import MAX_FRAME_BYTES, ToEngine, ToService

_HEADER = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()

Message = TypeVar("Message")
Frame = tuple[int, Message]

TO_ENGINE: msgspec.msgpack.Decoder[tuple[int, ToEngine]] = msgspec.msgpack.Decoder(tuple[int, ToEngine])
TO_SERVICE: msgspec.msgpack.Decoder[tuple[int, ToService]] = msgspec.msgpack.Decoder(tuple[int, ToService])
ENVELOPE: msgspec.msgpack.Decoder[tuple[int, msgspec.Raw]] = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
"""Reads the generation of a frame whose message this build may not know (the handshake needs no more)."""


def encode(generation: int, message: ToEngine | ToService) -> bytearray:
    """The bytes of one frame. Raises HandshakeError for a message over MAX_FRAME_BYTES, which no peer would take."""
    frame = bytearray(_HEADER.size)
    _ENCODER.encode_into((generation, message), frame, _HEADER.size)
    size = len(frame) - _HEADER.size
    if size > MAX_FRAME_BYTES:
        raise HandshakeError(f"a {type(message).__name__} of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    _HEADER.pack_into(frame, 0, size)
    return frame


class FrameSplitter:
    """Cuts a byte stream into frames' payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads completed by `data`. Raises HandshakeError when a header announces more than MAX_FRAME_BYTES."""
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(buffer, start)
            if size > MAX_FRAME_BYTES:
                raise HandshakeError(f"the peer announced a frame of {size} bytes, over the limit of {MAX_FRAME_BYTES}")
            end = start + _HEADER.size + size
            if end > len(buffer):
                break
            payloads.append(bytes(buffer[start + _HEADER.size : end]))
            start = end
        del buffer[:start]
        return payloads


class FrameReader(Generic[Message]):
    """Messages of one generation out of a byte stream, in order."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[tuple[int, Message]], generation: int) -> None:
        self._decode = decoder.decode
        self._generation = generation
        self._splitter = FrameSplitter()

    def feed(self, data: bytes) -> list[Message]:
        """Messages completed by `data`. Raises HandshakeError when the peer breaks the protocol."""
        messages: list[Message] = []
        for payload in self._splitter.feed(data):
            try:
                generation, message = self._decode(payload)
            except msgspec.DecodeError as error:
                raise HandshakeError(f"the peer sent a frame that does not parse: {error}") from error
            if generation == self._generation:
                messages.append(message)
        return messages
