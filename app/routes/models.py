"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.errors import ModelNotFound
from app.service import Service, service_of

router = APIRouter()


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.model_id, "object": "model", "created": service.created, "owned_by": "ullage"}


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    return _json({"object": "list", "data": [_model(service_of(request))]})


@router.get("/v1/models/{id:path}")
async def get_model(request: Request) -> Response:
    service = service_of(request)
    if request.path_params["id"] != service.model_id:
        raise ModelNotFound(service.model_id)
    return _json(_model(service))
