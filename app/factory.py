"""The composition root: one service from its parts, its two applications, and its life."""

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Scope

from app.access import Keyring, check_host
from app.edge import OTHER, Edge, handlers_of
from app.metrics import ServingMetrics, build_labels
from app.model import ServedModel
from app.ops import metrics as scraping
from app.recovery import EngineFactory, EngineSupervisor
from app.routes import generate, health, models
from app.scheduler import Limits, RequestScheduler
from app.service import Service
from app.settings import Settings
from app.streaming import KEEPALIVE_S, Delivery
from engine.messages import Ready

MIB = 1 << 20
ENGINE_STOP_S = 5.0

PUBLIC = (models.router, generate.router, health.router)
OPS = (scraping.router,)


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
) -> Service:
    """All parts of one service, put together; nothing is started."""

    def gauges() -> dict[str, float]:
        return service.gauges()

    metrics = ServingMetrics(model.name, max(model.trained_context, 1), [*handlers_of(PUBLIC + OPS), OTHER], gauges)
    metrics.tell("ullage_build_info", *build_labels(version()))
    limits = Limits(settings.max_queue, settings.max_inflight_mib * MIB)
    scheduler = RequestScheduler(model.prompts.text_bytes, limits, metrics)
    service = Service(
        model=model,
        scheduler=scheduler,
        supervisor=EngineSupervisor(engine, scheduler, metrics),
        metrics=metrics,
        api_keys=Keyring(api_keys),
        admin_keys=Keyring([admin_key]),
        ops_hosts=settings.ops_allowed_hosts,
        delivery=Delivery(settings.request_timeout, settings.sse_keepalive, keepalive_s),
        max_body_mib=settings.max_body_mib,
    )
    return service


def public_app(service: Service) -> Edge:
    """/v1/* behind the API keys, if there are any; the probes for everybody."""

    def guard(scope: Scope) -> None:
        if service.api_keys and scope["path"].startswith("/v1/"):
            service.api_keys.check(scope)

    return Edge(PUBLIC, guard, service)


def ops_app(service: Service) -> Edge:
    """/metrics for everybody who comes by an allowed name, /admin/* behind the admin key."""

    def guard(scope: Scope) -> None:
        check_host(scope, service.ops_hosts)
        if scope["path"].startswith("/admin"):
            service.admin_keys.check(scope)

    return Edge(OPS, guard, service)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator["asyncio.Task[Ready]"]:
    """The life of a service: its engine is started, as a task to await, and on leaving everything ends in order."""
    start = asyncio.create_task(_first_engine(service), name="first engine")
    try:
        yield start
    finally:
        start.cancel()
        await asyncio.wait([start])
        await service.supervisor.stop(ENGINE_STOP_S)
        service.prompts.close()


async def _first_engine(service: Service) -> Ready:
    ready = await service.supervisor.start()
    model = service.model
    service.metrics.tell("ullage_model_info", model.architecture, model.quantisation, str(ready.max_context), "")
    return ready
