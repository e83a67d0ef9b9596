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
    Checkpoint,
    Checkpointed,
    Grow,
    Heartbeat,
    Hello,
    Ledger,
    Load,
    LoadFailed,
    LoadProgress,
    Prepared,
    Ready,
    RungResult,
    Step,
    StepStats,
    Stop,
    Submit,
    Token,
    Trim,
    Trimmed,
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


def trim(channel: Channel, message: Trim | Grow, mode: str) -> None:
    """One rung on one device; `dies-at-trim` is what its name says."""
    if mode == "dies-at-trim":
        os._exit(6)
    if isinstance(message, Trim):
        result = RungResult(message.rung, message.device or 0, "ok", message.keep_bytes or 1, 0.1)
    else:
        result = RungResult("elastic", message.device or 0, "ok", -(message.bytes or 1), 0.1)
    channel.send(Ledger([{"kv_cache": 7}]))
    channel.send(Trimmed(message.request, [result]))


def checkpoint(carry_fd: int | None, budget: int) -> Checkpointed:
    """Leaves the word "carried" for the next one."""
    assert carry_fd is not None
    return Checkpointed(1, os.pwrite(carry_fd, b"carried"[:budget], 0), 0.0)


def load_when_told(channel: Channel, mode: str) -> Load:
    """The second half of a successor's start."""
    channel.send(Prepared())
    if mode == "dies-prepared":
        os._exit(4)
    [message] = channel.poll(None)
    assert isinstance(message, Load)
    return message


def serve(channel: Channel, mode: str, carry_fd: int | None = None) -> int:
    """Token n of a sequence is n; modes spoil it after the tenth step."""
    running: dict[int, list[int]] = {}
    step = 0
    while True:
        released = []
        for message in channel.poll(0.01 if running else None):
            if isinstance(message, Submit):
                running[message.sequence] = [len(message.generated_ids), message.max_tokens]
            elif isinstance(message, Trim | Grow):
                trim(channel, message, mode)
            elif isinstance(message, Checkpoint):
                if mode == "dies-at-checkpoint":
                    os._exit(5)
                channel.send(checkpoint(carry_fd, message.budget_bytes))
                running.clear()
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
    restored = 0
    if hello.successor:
        if mode == "slow-prepare":
            time.sleep(60)
        load = load_when_told(channel, mode)
        if load.restore:
            assert hello.carry_fd is not None
            restored = len(os.pread(hello.carry_fd, 100, 0))
    channel.send(LoadProgress("weights", 1, 2))
    if mode == "refuse":
        channel.send(LoadFailed("ModelFileError", f"{hello.config.model_path}: header: is truncated"))
        return 2
    if mode == "slow-load":
        time.sleep(60)
    if mode == "fd":
        channel.send(LoadProgress(os.read(hello.model_fd, 100).decode() + os.environ["ADDED"], 2, 2))
    channel.send(msgspec.structs.replace(READY, restored_blocks=restored))
    channel.send(Heartbeat(0, False, 0.0))
    with suppress(ServiceGone):
        return serve(channel, mode, hello.carry_fd)
    return 1


if __name__ == "__main__":
    sys.exit(main())
