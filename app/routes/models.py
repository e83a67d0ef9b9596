"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from app.errors import ModelNotFound
from app.service import Service


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.model_id, "object": "model", "created": service.created, "owned_by": "ullage"}


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def list_models(request: Request) -> Response:
    return _json({"object": "list", "data": [_model(request.app)]})


async def get_model(request: Request) -> Response:
    service: Service = request.app
    if request.path_params["id"] != service.model_id:
        raise ModelNotFound(service.model_id)
    return _json(_model(service))
