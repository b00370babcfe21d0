"""Puts the hot endpoints, which FastAPI never sees, into its OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from headrace_gateway.openai_bodies import ChatBody, CompletionBody
from headrace_gateway.openapi_examples import EXAMPLES, Json
from headrace_gateway.tokenize_api import DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/{name}"
_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_SUMMARIES = {
    "/v1/chat/completions": "Answer a conversation, whole or as a stream of events.",
    "/v1/completions": "Go on with a text, whole or as a stream of events.",
    "/tokenize": "Tell the ids that a prompt or a conversation is to a model.",
    "/detokenize": "Tell the text of ids.",
}
_NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}


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
            by_path, components = _request_schemas()
            for path, body in by_path.items():
                schema["paths"][path] = {"post": _operation(path, body)}
            known = schema.setdefault("components", {})
            known.setdefault("schemas", {}).update({**components, "Error": _ERROR})
            known["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # the documented way to extend it


def _request_schemas() -> tuple[dict[str, Json], Json]:
    """Return the JSON schemas of the request bodies by path, and the components they refer to."""
    schemas, components = msgspec.json.schema_components(_BODIES.values(), ref_template=_REF)
    return dict(zip(_BODIES, schemas, strict=True)), components


def _operation(path: str, body: Json) -> Json:
    is_stream = path.startswith("/v1/")
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    if is_stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "tags": ["generation" if is_stream else "tokens"],
        "operationId": path.strip("/").replace("/", "_"),
        "summary": _SUMMARIES[path],
        "security": [{"key": []}],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body, "examples": EXAMPLES[path]}},
        },
        "responses": {
            "200": {"description": "The answer, or its stream.", "content": content},
            "4XX": _error("What to fix; `param` names the field."),
            "5XX": _error("Try again; the message carries the request id."),
        },
    }


def _error(description: str) -> Json:
    schema = {"$ref": _REF.format(name="Error")}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
