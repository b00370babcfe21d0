"""Puts the hot endpoints, which FastAPI never sees, into its OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from headrace_gateway.openai_bodies import request_schemas

_REF = "#/components/schemas/{name}"


def add_hot_paths(app: FastAPI) -> None:
    """Make /docs and /openapi.json show the generating endpoints too."""

    def document() -> dict[str, Any]:  # Any: OpenAPI is JSON
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            by_path, components = request_schemas(_REF)
            for path, body in by_path.items():
                schema["paths"][path] = {"post": _operation(path, body)}
            schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # the documented way to extend it


def _operation(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": ["generation"],
        "operationId": path.strip("/").replace("/", "_"),
        "summary": "Generate an answer, streamed (server-sent events) or whole.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "The answer, or its stream."},
            "4XX": {"description": "An error object: what to fix."},
            "5XX": {"description": "An error object with the request id."},
        },
    }
