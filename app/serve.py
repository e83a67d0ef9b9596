"""`ullage serve`, first half: everything that can be refused is, then the engine gets a head start.

The child's start and load take about as long as this process needs to import the server and to parse the vocabulary, so
`app.lifecycle`, which does that, is imported only once the child runs.
"""

import asyncio
import importlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import uvloop

from app.demo_model import DemoModelError, ensure_demo_model
from app.settings import Settings, engine_variables
from app.sockets import Sockets, bound
from app.state import StateFolder, read_keys
from engine.client import EngineEvents, EngineLauncher, EngineProcess
from engine.errors import ConfigError
from engine.messages import Failed, LoadProgress, Step


@dataclass(frozen=True)
class Start:
    """What the second half takes over."""

    settings: Settings
    began: float
    """When the process did, in monotonic seconds."""
    check: bool
    """Only until ready."""
    sockets: Sockets
    model_path: str
    api_keys: list[str]
    admin_key: str
    admin_key_shown: str
    """Where the key is, and on a terminal what it is."""


def serve(settings: Settings, began: float, check: bool = False) -> None:
    """Run until told to stop, or with `check` until ready. Raises ConfigError and the engine's errors."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with ExitStack() as stack:
        state = StateFolder(Path(settings.state_dir))
        stack.callback(state.close)
        sockets = stack.enter_context(bound(settings.host, settings.port, settings.ops_host, settings.ops_port))
        api_keys = read_keys(Path(settings.api_key_file), "--api-key-file") if settings.api_key_file else []
        admin_key, shown = _admin_key(settings, state)
        path = settings.model or _demo_model(settings)
        launcher = EngineLauncher.open(settings.engine_config(path), engine_variables(settings))
        stack.callback(launcher.close)
        uvloop.run(_run(Start(settings, began, check, sockets, path, api_keys, admin_key, shown), launcher))


def _demo_model(settings: Settings) -> str:
    try:
        return str(ensure_demo_model(Path(settings.cache_dir)))
    except DemoModelError as error:
        raise ConfigError(str(error)) from error


def _admin_key(settings: Settings, state: StateFolder) -> tuple[str, str]:
    if settings.admin_key_file is not None:
        return read_keys(Path(settings.admin_key_file), "--admin-key-file")[0], f"in {settings.admin_key_file}"
    path, key = state.admin_key()
    return key, f"{key} (in {path})" if sys.stdout.isatty() else f"in {path}"


async def _run(start: Start, launcher: EngineLauncher) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _end_now)
    async with _head_start(launcher) as engines:
        lifecycle = importlib.import_module("app.lifecycle")
        await lifecycle.run(start, engines)


def _end_now(signal_number: int, frame: object) -> NoReturn:
    """Until `StopSignals` hears them: imports and the vocabulary keep the loop busy, it would hear them seconds late.

    Nothing is served yet, the kernel kills the engine with its service, and an exception from here would surface in
    the middle of somebody's import, who may turn it into another.
    """
    os._exit(0)


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


class HeadStart:
    """An engine factory whose first engine runs already, before there is a service to tell."""

    def __init__(self, launcher: EngineLauncher, first: EngineProcess) -> None:
        self._launcher = launcher
        self._first: EngineProcess | None = first

    def __call__(self, generation: int, events: EngineEvents) -> EngineProcess:
        first, self._first = self._first, None
        if first is None:
            return self._launcher(generation, events)
        assert generation == first.generation
        first.listen(events)
        return first

    async def close(self) -> None:
        if self._first is not None:
            await self._first.abandon()


@asynccontextmanager
async def _head_start(launcher: EngineLauncher) -> AsyncIterator[HeadStart]:
    first = launcher(1, _Unheard())
    await first.spawn()
    await asyncio.sleep(0)  # the handshake's first word leaves before this thread is busy
    engines = HeadStart(launcher, first)
    try:
        yield engines
    finally:
        await engines.close()


class _Unheard:
    """Listens until the service does. A death before that is told by `start`."""

    def on_progress(self, progress: LoadProgress) -> None: ...

    def on_step(self, step: Step) -> None: ...

    def on_failed(self, failed: Failed) -> None: ...

    def on_dead(self, reason: str) -> None: ...
