"""/v1/models: what the fleet serves, as far as the key may use it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from headrace_common.errors import ModelNotFound
from headrace_gateway.auth import KeyAuth
from headrace_gateway.model_routes.model_names import ModelNames

# JSON objects. Any: nested values.
Json = dict[str, Any]


def models_router(auth: KeyAuth, names: ModelNames) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def list_models(request: Request) -> Json:
        """List the models that the key may use, and the routes to them."""
        principal = await auth.authenticate(request.headers.raw)
        return {"object": "list", "data": names.listed(principal)}

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str, request: Request) -> Json:
        """Describe one model."""
        principal = await auth.authenticate(request.headers.raw)
        for listed in names.listed(principal):
            if listed["id"] == model:
                return listed
        names.check(model, principal)
        raise ModelNotFound(f"The model {model[:100]!r} does not exist.", param="model")

    return router
