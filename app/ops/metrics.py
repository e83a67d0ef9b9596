"""GET /metrics on the ops listener."""

from fastapi import APIRouter
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from app.service import service_of

router = APIRouter()


@router.get("/metrics")
async def scrape(request: Request) -> Response:
    """The text format or OpenMetrics, as the scraper asks for."""
    encoder, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encoder(service_of(request).metrics.registry), headers={"content-type": content_type})
