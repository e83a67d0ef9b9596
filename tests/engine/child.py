"""A child process that speaks the engine's protocol, well or badly: `child.py MODE --socket-fd N`. Tests only."""

import os
import socket
import sys
import time
from contextlib import suppress

import msgspec

from engine.build import build_id
from engine.channel import Channel
from engine.errors import ServiceGone
from engine.framing import ENVELOPE, FrameSplitter, encode
from engine.messages import (
    SCHEMA,
    Cancel,
    Heartbeat,
    Hello,
    LoadFailed,
    LoadProgress,
    Ready,
    Step,
    StepStats,
    Stop,
    Submit,
    Token,
    Welcome,
)

STATS = StepStats(*[0] * 10, seconds=0.0)
READY = Ready("test", 4096, 8, "f32", 64, 0, 0, 0.0)


def greet(sock: socket.socket, build: str) -> Hello:
    splitter = FrameSplitter()
    while not (frames := splitter.feed(sock.recv(1 << 16))):
        pass
    generation, raw = ENVELOPE.decode(frames[0])
    hello = msgspec.msgpack.decode(raw, type=Hello)
    sock.sendall(encode(generation, Welcome(build, SCHEMA, os.getpid())))
    return hello


def serve(channel: Channel, mode: str) -> int:
    """Token n of a sequence is n; modes spoil it after the tenth step."""
    running: dict[int, list[int]] = {}
    step = 0
    while True:
        released = []
        for message in channel.poll(0.01 if running else None):
            if isinstance(message, Submit):
                running[message.sequence] = [len(message.generated_ids), message.max_tokens]
            elif isinstance(message, Cancel):
                released += [sequence for sequence in message.sequences if running.pop(sequence, None)]
            elif isinstance(message, Stop):
                if mode == "deaf":
                    continue
                return 0
        step += 1
        tokens = []
        for sequence, state in list(running.items()):
            state[0] += 1
            finish = "length" if state[0] == state[1] else None
            tokens.append(Token(sequence, state[0] - 1, finish))
            if finish:
                released.append(sequence)
                del running[sequence]
        channel.send(Step(step, tokens, [], released, STATS))
        if step == 10:
            spoil(channel, mode)


def spoil(channel: Channel, mode: str) -> None:
    sock = channel._socket
    last_words = encode(1, Step(11, [Token(1, 999)], [], [], STATS))
    if mode == "torn":
        sock.send(last_words[: len(last_words) // 2])
        os._exit(3)
    elif mode == "foreign":
        sock.send(encode(7, Step(11, [Token(1, 999)], [], [], STATS)))
    elif mode == "garbage":
        sock.send(b"\x03\0\0\0abc")
        time.sleep(60)
    elif mode == "huge":
        sock.send(b"\xff\xff\xff\xff")
        time.sleep(60)
    elif mode == "segfault":
        os.kill(os.getpid(), 11)
    elif mode == "crash":
        raise RuntimeError("the child was told to crash")
    elif mode == "hangup":
        sock.close()
        time.sleep(60)


def main() -> int:
    mode = sys.argv[1]
    sock = socket.socket(fileno=int(sys.argv[-1]))
    if mode == "mute":
        time.sleep(60)
    if mode == "stillborn":
        sys.exit("cannot even begin")
    if mode == "chatty":
        os.write(2, b"x" * 1_000_000 + b"\nsecond line\n")
    hello = greet(sock, "0123456789abcdef" if mode == "other-build" else build_id())
    channel = Channel(sock, hello.generation)
    channel.send(LoadProgress("weights", 1, 2))
    if mode == "refuse":
        channel.send(LoadFailed("ModelFileError", f"{hello.config.model_path}: header: is truncated"))
        return 2
    if mode == "slow-load":
        time.sleep(60)
    if mode == "fd":
        channel.send(LoadProgress(os.read(hello.model_fd, 100).decode() + os.environ["ADDED"], 2, 2))
    channel.send(READY)
    channel.send(Heartbeat(0, False, 0.0))
    with suppress(ServiceGone):
        return serve(channel, mode)
    return 1


if __name__ == "__main__":
    sys.exit(main())
