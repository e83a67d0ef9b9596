"""POST /v1/chat/completions and /v1/completions: from a body to an admitted generation.

Every error that can be known is known here, before the first byte of an answer.
"""

import uuid
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request

from app.answers import Answer, ChatAnswer, CompletionAnswer
from app.record import ChoiceRequest
from app.schemas.body import parse
from app.schemas.chat import ChatBody
from app.schemas.completions import CompletionBody
from app.schemas.generation import GenerationBody
from app.service import Service, service_of
from app.streaming import PlainResponse, StreamResponse

router = APIRouter()

Body = TypeVar("Body", bound=GenerationBody)


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request) -> PlainResponse | StreamResponse:
    service = service_of(request)
    async with service.intake(request.scope, request.receive) as raw:
        body = _accept(service, raw, ChatBody)
        prompt = await service.prompts.chat(body.template_messages(), service.max_context)
        return _admit(request, body, [prompt], ChatAnswer, body.logprobs_asked, f"chatcmpl-{uuid.uuid4().hex}")


@router.post("/v1/completions", response_model=None)
async def completions(request: Request) -> PlainResponse | StreamResponse:
    service = service_of(request)
    async with service.intake(request.scope, request.receive) as raw:
        body = _accept(service, raw, CompletionBody)
        prompts = [await service.prompts.completion(prompt, service.max_context) for prompt in body.prompts]
        return _admit(request, body, prompts, CompletionAnswer, body.logprobs, f"cmpl-{uuid.uuid4().hex}")


def _accept(service: Service, raw: bytes, schema: type[Body]) -> Body:
    body = parse(raw, schema)
    service.require_model(body.model)
    body.check(service.prompts.vocabulary)
    return body


def _admit(
    request: Request,
    body: GenerationBody,
    prompts: list[list[int]],
    answer_type: type[Answer],
    logprobs: int | None,
    answer_id: str,
) -> PlainResponse | StreamResponse:
    service = service_of(request)
    choices = _choices(service, body, prompts, logprobs, starts_anew=answer_type is ChatAnswer)
    answer = answer_type(
        answer_id,
        service.now(),
        service.model_id,
        len(choices),
        service.prompts,
        logprobs=logprobs is not None,
        include_usage=body.wants_usage,
    )
    response = StreamResponse if body.stream else PlainResponse
    generation = service.scheduler.admit(request.state.request_id, choices)
    return response(generation, answer, body.choices, service.delivery)


def _choices(
    service: Service, body: GenerationBody, prompts: list[list[int]], logprobs: int | None, *, starts_anew: bool
) -> list[ChoiceRequest]:
    """`n` choices of each prompt, in the order of their indices; a chat's answer starts anew."""
    seed = body.resolved_seed()
    stop_ids = () if body.ignore_eos else service.prompts.stop_ids
    return [
        ChoiceRequest(
            prompt_ids=prompt,
            sampling=body.sampling(seed, choice, logprobs),
            max_tokens=min(body.limit or service.max_context, service.max_context - len(prompt)),
            stop_ids=stop_ids,
            stops=body.stops,
            cache_prompt=body.cache_prompt is not False,
            drop_leading_space=starts_anew and service.prompts.adds_space,
        )
        for prompt in prompts
        for choice in range(body.choices)
    ]
