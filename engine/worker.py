"""The engine process: `python -P -m engine.worker --socket-fd N`, a child of the service and of nobody else.

Handshake, parse, load (a successor when it is told to), serve. The main thread does all of it; the second thread only
beats the heart. Exit codes: 0 stopped in order, 2 the model or a setting was refused, 1 anything else. Its terminal is
the service's log.
"""

import argparse
import faulthandler
import os
import signal
import socket
import sys

import msgspec

from engine.build import build_id
from engine.channel import Channel
from engine.errors import ConfigError, DoesNotFit, HandshakeError, ModelFileError, OutOfMemory, ServiceGone
from engine.framing import ENVELOPE, FrameSplitter, encode
from engine.lifeline import Heart, die_with_service, volunteer_for_the_oom_killer
from engine.load import load, parse, prepare
from engine.messages import SCHEMA, Hello, Load, LoadFailed, LoadProgress, Prepared, Stop, Welcome

HANDSHAKE_TIMEOUT_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.worker", description="Started by the service, not by hand.")
    parser.add_argument("--socket-fd", type=int, required=True)
    sock = socket.socket(fileno=parser.parse_args().socket_fd)
    sock.set_inheritable(False)
    # Both may be sent to the whole group of a service that is told to end; it stops its engine when it is ready to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    try:
        die_with_service(sock)
        volunteer_for_the_oom_killer()
        return work(sock)
    except (ServiceGone, HandshakeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def work(sock: socket.socket) -> int:
    """From handshake to the end; the exit code."""
    build = build_id()
    hello = greet(sock, build)
    for descriptor in (hello.model_fd, hello.carry_fd):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    channel = Channel(sock, hello.generation)
    heart = Heart(channel)
    heart.start()
    try:
        channel.send(LoadProgress("header", 0, 1))
        model = parse(hello.config.model_path, hello.model_fd, build)
        channel.send(LoadProgress("header", 1, 1))
        order: Load | None = Load(hello.config, restore=False)
        if hello.successor:
            prepare(hello.config)
            order = told_to_load(channel)
        if order is None:
            return 0
        loop, ready = load(order.config, model, channel, hello.carry_fd, restore=order.restore)
    except (ModelFileError, DoesNotFit, ConfigError, OutOfMemory) as error:
        channel.send(LoadFailed(type(error).__name__, str(error)))
        return 2
    heart.watch(loop)
    channel.send(ready)
    loop.run()
    return 0


def greet(sock: socket.socket, build: str) -> Hello:
    """The handshake; the service says Hello and then nothing more before Prepared or Ready.

    Our Welcome is sent even if the rest of the Hello makes no sense: it lets the service say what does not agree.
    Raises HandshakeError when service and engine are not of one build, ServiceGone when the service says nothing.
    """
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    splitter = FrameSplitter()
    try:
        while not (frames := splitter.feed(data := sock.recv(1 << 16))):
            if not data:
                raise ServiceGone("the service closed the connection before the handshake")
    except TimeoutError:
        raise ServiceGone(f"the service said nothing for {HANDSHAKE_TIMEOUT_S:.0f} s") from None
    try:
        generation, raw = ENVELOPE.decode(frames[0])
        sock.sendall(encode(generation, Welcome(build, SCHEMA, os.getpid())))
        hello = msgspec.msgpack.decode(raw, type=Hello)
    except msgspec.DecodeError as error:
        raise HandshakeError(f"the service's Hello is not of this build: {error}") from error
    if (hello.build_id, hello.schema) != (build, SCHEMA):
        raise HandshakeError(f"the service is build {hello.build_id}/{hello.schema}, the engine {build}/{SCHEMA}")
    return hello


def told_to_load(channel: Channel) -> Load | None:
    """Wait until a successor's turn has come; None when the service has no use for it any more."""
    channel.send(Prepared())
    while True:
        for message in channel.poll(None):
            match message:
                case Load():
                    return message
                case Stop():
                    return None
                case _:
                    raise HandshakeError(f"{type(message).__name__} is not for an engine that waits to be loaded")


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # The interpreter's own way out takes numba down piece by piece, half a second for nothing.
    os._exit(code)
