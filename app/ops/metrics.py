"""GET /metrics on the ops listener."""

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from app.service import Service


async def scrape(request: Request) -> Response:
    """The text format or OpenMetrics, as the scraper asks for."""
    service: Service = request.app
    encoder, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encoder(service.metrics.registry), headers={"content-type": content_type})
