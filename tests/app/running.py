"""A whole service on real sockets, in a thread of its own, with the fake engine behind it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

import uvloop

from app.factory import create_service, running
from app.lifecycle import listening
from app.model import ServedModel
from app.service import Service
from app.settings import Settings
from app.sockets import Sockets, bind, url
from engine.client import EngineEvents
from engine.config import EngineConfig
from engine.fake import FakeEngine, Script
from engine.messages import Ready
from tests.app.byte_model import byte_model

Result = TypeVar("Result")
ADMIN_KEY = "the-admin-key"


def says(text: str) -> list[int]:
    """A script whose tokens are the bytes of a text."""
    return list(text.encode())


class NotYet(FakeEngine):
    """An engine that is for ever about to be ready."""

    async def load(self, config: EngineConfig, restore: bool) -> Ready:
        await super().load(config, restore)
        await asyncio.Event().wait()
        raise AssertionError


class Running:
    """The service from outside (`url`, `ops_url`) and, for the tests' questions, from inside (`call`)."""

    def __init__(self, settings: Settings, model: ServedModel, engine: dict[str, Any], **options: Any) -> None:
        self._settings = settings
        self._model = model
        self._engine = {"script": says("Hello there."), **engine}
        self._options = {"api_keys": [], "admin_key": ADMIN_KEY, **options}
        self._wait_ready = self._options.pop("wait_ready", True)
        self._engine_type: type[FakeEngine] = self._options.pop("engine_type", FakeEngine)
        self._started = threading.Event()
        self._error: BaseException | None = None
        self.engines: list[FakeEngine] = []
        self._thread = threading.Thread(target=self._main, name="service", daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(20), "the service did not start"
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the service did not stop"
        if self._error is not None:
            raise self._error

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    @property
    def v1(self) -> str:
        return self.url + "/v1"

    def call(self, function: Callable[[Service], Result]) -> Result:
        """Run a function of the service on its loop."""

        async def on_loop() -> Result:
            return function(self.service)

        return self.run(on_loop())

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(90)

    def wait_until(self, condition: Callable[[Service], bool]) -> None:
        """Poll on the service's loop."""

        async def poll() -> None:
            async with asyncio.timeout(60):
                while not condition(self.service):  # noqa: ASYNC110  # what is waited for tells nobody
                    await asyncio.sleep(0.002)

        self.run(poll())

    def _make_engine(self, generation: int, events: EngineEvents) -> FakeEngine:
        engine = self._engine_type(generation=generation, events=events, **self._engine)
        self.engines.append(engine)
        return engine

    def _main(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:  # noqa: BLE001  # handed to the test's thread
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        sockets = Sockets(bind("127.0.0.1", 0, "--port"), bind("127.0.0.1", 0, "--ops-port"))
        self.url, self.ops_url = url(sockets.public, "127.0.0.1"), url(sockets.ops, "127.0.0.1")
        self.service = create_service(self._settings, self._model, self._make_engine, **self._options)
        async with AsyncExitStack() as stack:
            start = await stack.enter_async_context(running(self.service))
            await stack.enter_async_context(listening(self.service, sockets))
            if self._wait_ready:
                await start
            self._started.set()
            await self._stop.wait()


@contextmanager
def service(
    script: Script | Sequence[int] | None = None,
    *,
    model: ServedModel | None = None,
    engine: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Running]:
    """A running service that answers with `script`; ended on leaving."""
    chosen = {**(engine or {})}
    if script is not None:
        chosen["script"] = script
    instance = Running(Settings(**(settings or {})), model or byte_model(), chosen, **options)
    instance.start()
    try:
        yield instance
    finally:
        instance.stop()
