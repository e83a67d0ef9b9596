"""What the routes work with: one served model, its engine, its limits."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Receive, Scope

from app.access import Keyring
from app.errors import Busy, Draining, EngineLoading, EngineUnavailable, ModelNotFound
from app.metrics import ServingMetrics
from app.model import ServedModel
from app.prompts import Prompts
from app.recovery import EngineSupervisor
from app.scheduler import RequestScheduler
from app.schemas.body import read_body
from app.streaming import Delivery

ELEMENTS = 1 << 18
"""Besides two for each token of the context, a body may have so many elements: about 50 ms of parsing."""


def service_of(request: Request) -> "Service":
    """The service that a listener belongs to."""
    service: Service = request.app.state.service
    return service


@dataclass(frozen=True)
class Service:
    model: ServedModel
    scheduler: RequestScheduler
    supervisor: EngineSupervisor
    metrics: ServingMetrics
    api_keys: Keyring
    admin_keys: Keyring
    ops_hosts: tuple[str, ...]
    delivery: Delivery
    max_body_mib: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_id(self) -> str:
        return self.model.name

    @property
    def prompts(self) -> Prompts:
        return self.model.prompts

    @property
    def max_context(self) -> int:
        """Of the engine there is, or that was there last. Raises EngineLoading before the first."""
        if self.supervisor.ready is None:
            raise EngineLoading
        return self.supervisor.ready.max_context

    def now(self) -> int:
        return int(time.time())

    def refusal(self) -> Busy | None:
        """The 503 that a new request would get now. While the engine is replaced, requests are held instead."""
        phase = self.supervisor.phase
        if phase == "loading":
            return EngineLoading()
        if phase == "stopped" or self.scheduler.draining:
            return Draining()
        return EngineUnavailable() if phase == "failed" else None

    def require_model(self, name: str) -> None:
        if name != self.model_id:
            raise ModelNotFound(self.model_id)

    def gauges(self) -> dict[str, float]:
        """The gauges that are known now, for a scrape."""
        scheduler, supervisor = self.scheduler, self.supervisor
        known: dict[str, float] = {
            "ullage_num_requests_running": scheduler.running,
            "ullage_num_requests_waiting": scheduler.waiting,
            "ullage_num_requests_held": scheduler.held,
            "ullage_engine_up": supervisor.phase == "ready",
        }
        if supervisor.phase == "ready":
            known["ullage_kv_cache_usage_perc"] = self.metrics.kv_usage
        if supervisor.ready_at is not None:
            known["ullage_engine_start_time_seconds"] = supervisor.ready_at
        return known

    @asynccontextmanager
    async def intake(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The body of a request that may be admitted; its bytes count as held until the block is left.

        Raises a Busy before anything is read; BodyTooLarge, InvalidRequest and QueueFull while it is.
        """
        refusal = self.refusal()
        if refusal is not None:
            self.metrics.rejected("draining" if isinstance(refusal, Draining) else "engine_unavailable")
            raise refusal
        with self.scheduler.hold() as count:
            yield await read_body(scope, receive, self.max_body_mib, ELEMENTS + 2 * self.max_context, count)
