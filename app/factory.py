"""The composition root: one service from its parts, its two applications, and its life."""

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.types import Scope

from app.access import Keyring
from app.boot import Boot
from app.card_lock import CardLocks
from app.carry import Carry
from app.devices import NO_DEVICES, Devices
from app.edge import OTHER, Edge, handlers_of
from app.events import FILE_NAME as EVENTS_FILE
from app.events import Events
from app.journal import Journal
from app.metrics import ServingMetrics, build_labels
from app.model import ServedModel
from app.observers import Observers
from app.ops import admin, events, login, page, scraping, vram
from app.ops.access import HEADERS, OpsGuard, Sessions
from app.plan_file import PlanFile
from app.pressure import Pressure
from app.recovery import EngineFactory, EngineSupervisor, Patience
from app.request_table import FILE_NAME as REQUESTS_FILE
from app.request_table import RequestTable
from app.routes import generate, health, models
from app.scheduler import Limits, RequestScheduler
from app.service import Service
from app.settings import Settings
from app.settle import Cards
from app.streaming import KEEPALIVE_S, Delivery
from engine.config import EngineConfig
from engine.messages import Ready
from watchdog.source import Card

MIB = 1 << 20
ENGINE_STOP_S = 5.0
HISTORY_S = 1.0

PUBLIC = (models.router, generate.router, health.router)
OPS = (page.router, scraping.router, login.router, vram.router, events.router, admin.router)


def version() -> str:
    return importlib.metadata.version("ullage")


def create_service(
    settings: Settings,
    model: ServedModel,
    engine: EngineFactory,
    *,
    api_keys: list[str],
    admin_key: str,
    keepalive_s: float = KEEPALIVE_S,
    engine_config: EngineConfig | None = None,
    patience: Patience | None = None,
    cards: Cards | None = None,
    carry: Carry | None = None,
    boot: Boot | None = None,
    devices: Devices = NO_DEVICES,
    poison: str | None = None,
    journals: Path | None = None,
) -> Service:
    """All parts of one service, put together; nothing is started.

    `journals` is the folder of what outlives the service: events, the table of requests, the plan.
    """

    def gauges() -> dict[str, float]:
        return service.gauges()

    metrics = ServingMetrics(model.name, max(model.trained_context, 1), [*handlers_of(PUBLIC + OPS), OTHER], gauges)
    metrics.tell("ullage_build_info", build_labels(version()))
    events = Events(None if journals is None else Journal(journals / EVENTS_FILE))
    table = RequestTable(None if journals is None else Journal(journals / REQUESTS_FILE))
    boot = boot or Boot()
    pressure = Pressure(devices, settings.watchdog_config(), events, table, boot.reloads())
    metrics.watch(pressure.status, pressure.counts)
    plan_file = PlanFile(journals, lambda: service.supervisor.ready)
    observers = Observers(metrics, pressure.workload, pressure, plan_file)
    limits = Limits(settings.max_queue, settings.max_inflight_mib * MIB)
    scheduler = RequestScheduler(model.prompts.text_bytes, limits, observers)
    supervisor = EngineSupervisor(
        engine,
        engine_config or settings.engine_config(model.path),
        scheduler,
        observers,
        patience=patience or Patience(hang_s=settings.hang_seconds),
        cards=cards or pressure.samples,
        carry=carry,
        boot=boot,
        locks=None if settings.simulate_gpus is None else CardLocks(Path(settings.state_dir)),  # nobody else's cards
    )
    service = Service(
        model=model,
        scheduler=scheduler,
        supervisor=supervisor,
        metrics=metrics,
        api_keys=Keyring(api_keys),
        admin_keys=Keyring([admin_key]),
        ops_hosts=settings.ops_allowed_hosts,
        delivery=Delivery(settings.request_timeout, settings.sse_keepalive, keepalive_s),
        max_body_mib=settings.max_body_mib,
        pressure=pressure,
        events=events,
        table=table,
        sessions=Sessions(admin_key),
        plan_file=plan_file,
        version=version(),
        sheds=settings.reload_readiness == "shed",
        poison=poison,
    )
    return service


def public_app(service: Service) -> Edge:
    """/v1/* behind the API keys, if there are any; the probes for everybody."""

    def guard(scope: Scope) -> None:
        if service.api_keys and scope["path"].startswith("/v1/"):
            service.api_keys.check(scope)

    return Edge(PUBLIC, guard, service)


def ops_app(service: Service) -> Edge:
    """/metrics and the status page for everybody who comes by an allowed name, /admin/* behind the admin key."""
    guard = OpsGuard(service.admin_keys, service.sessions, service.ops_hosts)
    return Edge(OPS, guard, service, HEADERS)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator["asyncio.Task[Ready]"]:
    """The life of a service: its engine is started, as a task to await, and on leaving everything ends in order."""
    service.events.record("service", f"version {service.version} starts")
    service.pressure.start(service.supervisor, service.scheduler)
    start = asyncio.create_task(_first_engine(service), name="first engine")
    remember = asyncio.create_task(_remember(service), name="history of the devices")
    try:
        yield start
    finally:
        start.cancel()
        remember.cancel()
        await asyncio.wait([start, remember])
        await service.supervisor.stop(ENGINE_STOP_S)
        await service.pressure.stop()
        service.prompts.close()
        await asyncio.to_thread(service.close)


async def _first_engine(service: Service) -> Ready:
    ready = await service.supervisor.start()
    model = service.model
    split = ",".join(map(str, ready.layer_split))
    service.plan_file.write()
    about = (model.architecture, model.quantisation, str(ready.max_context), split)
    service.metrics.tell("ullage_model_info", about)
    service.metrics.tell("ullage_device_info", *device_labels(service.pressure.cards, ready))
    return ready


def device_labels(cards: Sequence[Card], ready: Ready) -> list[tuple[str, ...]]:
    """Values of ullage_device_info, by device; what does not apply is empty."""
    stages = {device.uuid: ",".join(map(str, device.stages)) for device in ready.devices}
    return [
        (str(device), card.uuid, card.name, card.bus_id or "", stages.get(card.uuid, ""), card.parent or "")
        for device, card in enumerate(cards)
    ]


async def _remember(service: Service) -> None:
    while service.pressure.devices:
        service.history.add(service.pressure.status())
        await asyncio.sleep(HISTORY_S)
