"""The engine process: `python -P -m engine.worker --socket-fd N`, a child of the service and of nobody else.

Handshake, load, serve. The main thread does all of it; the second thread only beats the heart. Exit codes: 0 stopped in
order, 2 the model or a setting was refused, 1 anything else. Its terminal is the service's log.
"""

import argparse
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.build import build_id
from engine.channel import Channel
from engine.config import EngineConfig
from engine.errors import ConfigError, DoesNotFit, HandshakeError, ModelFileError, ServiceGone
from engine.framing import ENVELOPE, FrameSplitter, encode
from engine.gguf import GgufFile, open_gguf
from engine.kv_cache.blocks import BlockPool
from engine.lifeline import Heart, die_with_service, volunteer_for_the_oom_killer
from engine.loop import EngineLoop
from engine.memory.host import available_bytes
from engine.messages import SCHEMA, Hello, LoadFailed, LoadProgress, Ready, Welcome
from engine.model.config import ModelConfig
from engine.model.size import kv_block_bytes, weights_bytes
from engine.pipeline import Pipeline
from engine.plan import plan_cpu
from engine.scheduler import Scheduler

HANDSHAKE_TIMEOUT_S = 30.0

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Backend:
    """One device with the model loaded: what computes, and what it decided or has."""

    pipeline: Pipeline
    device: str
    kv_dtype: str
    kv_blocks: int
    kv_bytes: int
    weight_bytes: int
    max_context: int


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
    channel = Channel(sock, hello.generation)
    heart = Heart(channel)
    heart.start()
    try:
        loop, ready = load(hello, build, channel)
    except (ModelFileError, DoesNotFit, ConfigError) as error:
        channel.send(LoadFailed(type(error).__name__, str(error)))
        return 2
    heart.watch(loop)
    channel.send(ready)
    loop.run()
    return 0


def greet(sock: socket.socket, build: str) -> Hello:
    """The handshake; the service says Hello and then nothing more before Ready.

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


def load(hello: Hello, build: str, channel: Channel) -> tuple[EngineLoop, Ready]:
    """Read, plan, allocate. Raises ModelFileError, DoesNotFit or ConfigError before anything large is allocated."""
    began = time.monotonic()
    config = hello.config
    os.set_inheritable(hello.model_fd, False)

    def progress(phase: str, done: int, total: int) -> None:
        channel.send(LoadProgress(phase, done, total))

    progress("header", 0, 1)
    gguf = open_gguf(config.model_path, hello.model_fd)
    model = ModelConfig.from_gguf(gguf)
    progress("header", 1, 1)
    try:
        backend = load_backend(config, gguf, model, progress)
    except MemoryError as error:
        raise DoesNotFit(f"{config.model_path}: memory ran out while loading: {error}") from error
    pool = BlockPool(backend.kv_blocks, fingerprint(hello.model_fd, backend.kv_dtype, build))
    scheduler = Scheduler(
        pool,
        config.max_batch,
        backend.max_context,
        config.prefill_chunk,
        config.prefill_chunk_idle,
        config.prefill_chunk_fixed,
    )
    ready = Ready(
        device=backend.device,
        max_context=backend.max_context,
        max_batch=config.max_batch,
        kv_dtype=backend.kv_dtype,
        kv_blocks=backend.kv_blocks,
        kv_bytes=backend.kv_bytes,
        weight_bytes=backend.weight_bytes,
        load_seconds=time.monotonic() - began,
    )
    return EngineLoop(backend.pipeline, scheduler, channel, channel), ready


def load_backend(config: EngineConfig, gguf: GgufFile, model: ModelConfig, progress: Progress) -> Backend:
    """The one place where the device is chosen. Raises ConfigError for one that this build does not have."""
    if config.device in ("auto", "cpu"):
        return load_cpu_backend(config, gguf, model, progress)
    raise ConfigError(f"--device {config.device}: this build runs on the cpu only")


def load_cpu_backend(config: EngineConfig, gguf: GgufFile, model: ModelConfig, progress: Progress) -> Backend:
    kv_dtype = "f32" if config.kv_dtype == "auto" else config.kv_dtype
    plan = plan_cpu(
        config,
        model,
        weight_bytes=weights_bytes(gguf, model),
        block_bytes=kv_block_bytes(model, kv_dtype),
        available_bytes=available_bytes(),
    )
    # Not at the top: it brings in numba, which takes longer than everything up to here and which no other device needs.
    from engine.ops.cpu.load import load_cpu

    pipeline = load_cpu(gguf, model, msgspec.structs.replace(config, kv_dtype=kv_dtype), plan.kv_blocks, progress)
    return Backend(pipeline, "cpu", kv_dtype, plan.kv_blocks, plan.kv_bytes, plan.weight_bytes, plan.max_context)


def fingerprint(model_fd: int, kv_dtype: str, build: str) -> str:
    """Names all that the KV of a text depends on: the model file, how KV is kept, our arithmetic."""
    status = os.fstat(model_fd)
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns} {kv_dtype} {build}"


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # The interpreter's own way out takes numba down piece by piece, half a second for nothing.
    os._exit(code)
