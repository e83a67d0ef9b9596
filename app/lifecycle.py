"""`ullage serve`, second half: the service from its composition to its end."""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from app.banner import Banner
from app.errors import ShutDown
from app.factory import create_service, ops_app, public_app, running, version
from app.listeners import Listener
from app.model import ServedModel, read_model
from app.recovery import EngineFactory, EngineSupervisor
from app.serve import Start, StopSignals
from app.service import Service
from app.sockets import Sockets, url
from engine.errors import EngineDied

PROGRESS_S = 0.1


async def run(start: Start, engines: EngineFactory) -> None:
    """Serve until a signal. Raises ModelFileError, LoadRefused, HandshakeError or EngineDied."""
    # The edge logs our own failures; what is left to uvicorn are clients that break off, at our end or theirs.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    settings = start.settings
    model = read_model(start.model_path, settings.model_id(start.model_path))
    service = create_service(settings, model, engines, api_keys=start.api_keys, admin_key=start.admin_key)
    signals = StopSignals()
    signals.catch()  # not before: the loop hears nothing while all of the above keeps it busy
    async with running(service) as first_engine, listening(service, start.sockets):
        with _progress(service.supervisor):
            await _first(first_engine, signals.asked)
        if not first_engine.done():
            return
        ready = first_engine.result()
        if start.check:
            sys.stdout.write("\n".join(["would serve with", *settings.lines(), ""]))
            return
        sys.stdout.write(_banner(start, model).text(ready, time.monotonic() - start.began))
        sys.stdout.flush()
        await _first(service.supervisor.failed, signals.asked)
        if service.supervisor.failure is not None:
            raise EngineDied(f"no engine can be started any more: {service.supervisor.failure}")
        await _drain(service, signals, settings.drain_timeout)


def _banner(start: Start, model: ServedModel) -> Banner:
    settings = start.settings
    return Banner(
        version=version(),
        model=model.name,
        model_path=model.path,
        architecture=model.architecture,
        quantisation=model.quantisation,
        public_url=url(start.sockets.public, settings.host),
        ops_url=url(start.sockets.ops, settings.ops_host),
        api_key_file=settings.api_key_file and str(Path(settings.api_key_file).resolve()),
        admin_key=start.admin_key_shown,
    )


async def _drain(service: Service, signals: StopSignals, timeout_s: float) -> None:
    """No new requests; those that run may end until the deadline or a second signal, then they are ended."""
    service.scheduler.drain()
    idle = asyncio.create_task(service.scheduler.idle())
    await _first(idle, signals.now, timeout_s=timeout_s)
    idle.cancel()
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
