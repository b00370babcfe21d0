"""/v1/models: what the fleet serves, as far as the key may use it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from headrace_common.errors import ModelNotFound
from headrace_contracts.billing.v1.billing_pb2 import Principal
from headrace_contracts.worker.v1.worker_pb2 import ModelCard
from headrace_gateway.auth import KeyAuth, check_model_allowed
from headrace_gateway.model_directory import ModelDirectory

# JSON objects. Any: nested values.
Json = dict[str, Any]


def models_router(auth: KeyAuth, directory: ModelDirectory) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def list_models(request: Request) -> Json:
        """List the models that the key may use."""
        principal = await auth.authenticate(request.headers.raw)
        cards = [card for card in directory.cards() if _may_use(principal, card.model)]
        return {"object": "list", "data": [_model(card) for card in cards]}

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str, request: Request) -> Json:
        """Describe one model."""
        principal = await auth.authenticate(request.headers.raw)
        for card in directory.cards():
            if card.model == model:
                check_model_allowed(principal, model)
                return _model(card)
        raise ModelNotFound(f"The model {model[:100]!r} does not exist.", param="model")

    return router


def _may_use(principal: Principal, model: str) -> bool:
    return not principal.allowed_models or model in principal.allowed_models


def _model(card: ModelCard) -> Json:
    return {
        "id": card.model,
        "object": "model",
        "created": card.created_unix_s,
        "owned_by": "headrace",
        "context_window": card.context_tokens,
        "max_model_len": card.context_tokens,
    }
