"""`ullage serve`: from settings to a running service, and to its end."""

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from app.banner import Banner
from app.demo_model import ensure_demo_model
from app.errors import ShutDown
from app.factory import VERSION, create_service, ops_app, public_app, running
from app.listeners import Listener, bind, url
from app.model import ServedModel, read_model
from app.recovery import EngineSupervisor
from app.service import Service
from app.settings import Settings, engine_variables
from app.state import StateFolder, read_keys
from engine.client import EngineLauncher
from engine.errors import EngineDied
from engine.messages import Ready

PROGRESS_S = 0.1


@dataclass(frozen=True)
class Sockets:
    public: socket.socket
    ops: socket.socket


def serve(settings: Settings, began: float, check: bool = False) -> None:
    """Run until told to stop; with `check` only until ready. `began` is when the process did, in monotonic time.

    Raises ConfigError, DemoModelError and the engine's errors before anything is left half started.
    """
    _log_to_stderr()
    with ExitStack() as stack:
        state = StateFolder(Path(settings.state_dir))
        stack.callback(state.close)
        sockets = Sockets(
            bind(settings.host, settings.port, "--port"), bind(settings.ops_host, settings.ops_port, "--ops-port")
        )
        for bound in (sockets.public, sockets.ops):
            stack.callback(bound.close)
        api_keys = read_keys(Path(settings.api_key_file), "--api-key-file") if settings.api_key_file else []
        admin_key, where = _admin_key(settings, state)
        path = settings.model or str(ensure_demo_model(Path(settings.cache_dir)))
        launcher = EngineLauncher.open(settings.engine_config(path), engine_variables(settings))
        stack.callback(launcher.close)
        model = read_model(path, settings.model_id(path))
        service = create_service(settings, model, launcher, api_keys=api_keys, admin_key=admin_key)
        banner = _banner(settings, model, sockets, where)
        uvloop.run(_run(settings, service, sockets, banner, began, check))


def _log_to_stderr() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    # The edge logs our own failures; what is left to uvicorn are clients that break off, at our end or theirs.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)


def _admin_key(settings: Settings, state: StateFolder) -> tuple[str, str]:
    """The key, and what to print about it: where it is, and what it is only to a person who is looking."""
    if settings.admin_key_file is not None:
        return read_keys(Path(settings.admin_key_file), "--admin-key-file")[0], f"in {settings.admin_key_file}"
    path, key = state.admin_key()
    return key, f"{key} (in {path})" if sys.stdout.isatty() else f"in {path}"


def _banner(settings: Settings, model: ServedModel, sockets: Sockets, admin_key: str) -> Banner:
    return Banner(
        version=VERSION,
        model=model.name,
        model_path=model.path,
        architecture=model.architecture,
        quantisation=model.quantisation,
        public_url=url(sockets.public, settings.host),
        ops_url=url(sockets.ops, settings.ops_host),
        api_key_file=settings.api_key_file and str(Path(settings.api_key_file).resolve()),
        admin_key=admin_key,
    )


class StopSignals:
    """SIGTERM asks for an end once the running requests are done; SIGINT, or a second signal, for one now."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()

    def catch(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stop_now)
        loop.add_signal_handler(signal.SIGTERM, self._stop)

    def _stop(self) -> None:
        if self.asked.is_set():
            self.now.set()
        self.asked.set()

    def _stop_now(self) -> None:
        self.asked.set()
        self.now.set()


async def _run(
    settings: Settings, service: Service, sockets: Sockets, banner: Banner, began: float, check: bool
) -> None:
    signals = StopSignals()
    signals.catch()
    async with running(service) as start, listening(service, sockets):
        with _progress(service.supervisor):
            await _first(start, signals.asked)
        if not start.done():
            return
        ready: Ready = start.result()
        if check:
            sys.stdout.write("\n".join(["would serve with", *settings.lines(), ""]))
            return
        sys.stdout.write(banner.text(ready, time.monotonic() - began) + "\n")
        sys.stdout.flush()
        await _first(service.supervisor.failed, signals.asked)
        if service.supervisor.failure is not None:
            raise EngineDied(f"no engine can be started any more: {service.supervisor.failure}")
        await _drain(service, signals, settings.drain_timeout)


async def _drain(service: Service, signals: StopSignals, timeout_s: float) -> None:
    """No new requests; those that run may end until the deadline or a second signal, then they are ended."""
    service.scheduler.drain()
    await _first(asyncio.create_task(service.scheduler.idle()), signals.now, timeout_s=timeout_s)
    service.scheduler.fail_all(ShutDown())


async def _first(*things: "asyncio.Task[object] | asyncio.Event", timeout_s: float | None = None) -> None:
    """Wait until a task is done or an event is set, whichever comes first."""
    waits = [asyncio.create_task(thing.wait()) if isinstance(thing, asyncio.Event) else thing for thing in things]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait, thing in zip(waits, things, strict=True):
        if wait is not thing:
            wait.cancel()


@asynccontextmanager
async def listening(service: Service, sockets: Sockets) -> AsyncIterator[None]:
    """Both listeners answer within the block; on leaving, what they are still writing gets a moment to end."""
    listeners = [Listener(public_app(service), sockets.public), Listener(ops_app(service), sockets.ops)]
    tasks = [asyncio.create_task(listener.run_until_told()) for listener in listeners]
    try:
        yield
    finally:
        service.scheduler.drain()
        service.scheduler.fail_all(ShutDown())
        for listener in listeners:
            listener.should_exit = True
        await asyncio.gather(*tasks)


@contextmanager
def _progress(supervisor: EngineSupervisor) -> Iterator[None]:
    """On a terminal, one line that follows the load and is gone after it."""
    if not sys.stderr.isatty():
        yield
        return
    task = asyncio.create_task(_show_progress(supervisor))
    try:
        yield
    finally:
        task.cancel()
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()


async def _show_progress(supervisor: EngineSupervisor) -> None:
    while True:
        progress = supervisor.progress
        if progress is not None:
            percent = f" {100 * progress.done // progress.total}%" if progress.total else ""
            sys.stderr.write(f"\r\033[Kloading: {progress.phase}{percent}")
            sys.stderr.flush()
        await asyncio.sleep(PROGRESS_S)
