"""/v1/models: what the fleet serves, as far as the key may use it.

Who sends `anthropic-version` gets Anthropic's shapes and pages, others OpenAI's.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request

from headrace_common.errors import InvalidRequest, ModelNotFound
from headrace_gateway.answer_extras import Json
from headrace_gateway.auth import KeyAuth
from headrace_gateway.messages_api.dialect import is_anthropic
from headrace_gateway.model_routes.model_names import ModelNames
from headrace_gateway.pages import page_around

_PAGE = 20


def models_router(auth: KeyAuth, names: ModelNames) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def list_models(
        request: Request,
        limit: Annotated[int | None, Query(ge=1, le=1000)] = None,
        after_id: str | None = None,
        before_id: str | None = None,
    ) -> Json:
        """List the models that the key may use, and the routes to them.

        OpenAI's list is whole; the parameters are for pages of Anthropic's.
        """
        principal = await auth.authenticate(request.headers.raw)
        listed = await names.listed(principal)
        if is_anthropic(request.url.path, request.headers):
            shown = [_anthropic(model) for model in listed]
            return page_around(shown, limit or _PAGE, after_id, before_id)
        given = {"limit": limit, "after_id": after_id, "before_id": before_id}
        for name, value in given.items():
            if value is not None:
                raise InvalidRequest(f"{name} needs the header anthropic-version.", param=name)
        return {"object": "list", "data": listed}

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str, request: Request) -> Json:
        """Describe one model."""
        principal = await auth.authenticate(request.headers.raw)
        for listed in await names.listed(principal):
            if listed["id"] == model:
                speaks = is_anthropic(request.url.path, request.headers)
                return _anthropic(listed) if speaks else listed
        await names.check(model, principal)
        raise ModelNotFound(f"The model {model[:100]!r} does not exist.", param="model")

    return router


def _anthropic(model: Json) -> Json:
    made = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": made.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": model["context_window"],
        "max_tokens": model["context_window"],
        "lifecycle": "active",
        **dict.fromkeys(("capabilities", "deprecated_at", "retires_at", "line")),
    }
