"""The OpenAPI document: FastAPI's, with the hot endpoints, which it never sees."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from headrace_gateway.batch_api.batch_routes import BatchBody
from headrace_gateway.batch_api.message_routes import MessageBatchBody
from headrace_gateway.batch_api.upload_routes import CompleteBody, UploadBody
from headrace_gateway.embeddings import EmbeddingsBody
from headrace_gateway.messages_api.bodies import CountBody, MessagesBody
from headrace_gateway.moderations import ModerationBody
from headrace_gateway.openai_bodies import ChatBody, CompletionBody
from headrace_gateway.openapi_answers import ANSWERS
from headrace_gateway.openapi_examples import EXAMPLES, Json
from headrace_gateway.openapi_rest import LINKS, REST_SCHEMAS, add_rest_answers, error_answers
from headrace_gateway.responses_api.bodies import InputTokensBody, ResponsesBody
from headrace_gateway.tokenize_api import DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/{name}"
_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": InputTokensBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/moderations": ModerationBody,
    "/v1/batches": BatchBody,
    "/v1/uploads": UploadBody,
    "/v1/messages/batches": MessageBatchBody,
}
# Of FastAPI's routes, which name them.
_REST_BODIES = (CompleteBody,)
_SUMMARIES = {
    "/v1/chat/completions": "Answer a conversation, whole or as a stream of events.",
    "/v1/completions": "Go on with a text, whole or as a stream of events.",
    "/tokenize": "Tell the ids that a prompt or a conversation is to a model.",
    "/detokenize": "Tell the text of ids.",
    "/v1/messages": "Answer a conversation as Anthropic's SDKs ask, whole or streamed.",
    "/v1/messages/count_tokens": "Tell how long the prompt of a message would be.",
    "/v1/responses": "Make a response: whole, as a stream of events, or in the background.",
    "/v1/responses/input_tokens": "Tell how long the prompt of a response would be.",
    "/v1/moderations": "Judge texts by the guard's categories and OpenAI's.",
    "/v1/embeddings": "Turn texts into vectors.",
    "/v1/messages/batches": "Answer messages in the gaps of other traffic, at the batch price.",
    "/v1/uploads": "Begin a file of requests that comes in parts.",
    "/v1/batches": "Run a file of requests in the gaps of other traffic, at the batch price.",
}
_STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
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

_MESSAGES_ERROR: Json = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "request_id": {"type": "string"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
# Of one event; readers of OpenAPI take the schema of a stream for that of its items.
_EVENT: Json = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}


def whole_openapi(app: FastAPI) -> dict[str, Any]:  # Any: OpenAPI is JSON
    """Return what /docs and /openapi.json show: the generating endpoints too."""
    schema = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    by_path, components = _request_schemas()
    for path, body in by_path.items():
        schema["paths"].setdefault(path, {})["post"] = _operation(path, body)
    add_rest_answers(schema["paths"])
    known = schema.setdefault("components", {})
    # FastAPI's own errors are never sent.
    known["schemas"] = {
        **components,
        **dict(ANSWERS.values()),
        **REST_SCHEMAS,
        "Error": _ERROR,
        "MessagesError": _MESSAGES_ERROR,
    }
    known["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return schema


def _request_schemas() -> tuple[dict[str, Json], Json]:
    """Return the JSON schemas of the request bodies by path, and the components they refer to."""
    bodies = [*_BODIES.values(), *_REST_BODIES]
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    return dict(zip(_BODIES, schemas, strict=False)), components


def _operation(path: str, body: Json) -> Json:
    is_stream = path in _STREAMS
    answer: Json = {"type": "object"}
    if path in ANSWERS:
        answer = {"$ref": _REF.format(name=ANSWERS[path][0])}
    content: Json = {"application/json": {"schema": answer}}
    if is_stream:
        content["text/event-stream"] = {"schema": _EVENT}
    return {
        "tags": ["generation" if is_stream else path.split("/")[-1]],
        "operationId": path.strip("/").replace("/", "_"),
        "summary": _SUMMARIES[path],
        "security": [{"key": []}],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body, "examples": EXAMPLES[path]}},
        },
        "responses": {
            "200": {
                "description": "The answer, or its stream.",
                "content": content,
                **({"links": LINKS[path]} if path in LINKS else {}),
            },
            **error_answers(path),
        },
    }
