"""JSON schemas of the hot endpoints' whole answers, as the OpenAPI document shows them."""

from __future__ import annotations

from typing import Any

# Any: JSON schemas.
Json = dict[str, Any]

TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}


def object_of(fields: Json, optional: Json | None = None) -> Json:
    """Return the schema of an object that has all *fields*, and maybe others."""
    return {
        "type": "object",
        "required": list(fields),
        "properties": {**fields, **(optional or {})},
    }


def list_of(items: Json) -> Json:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def maybe(schema: Json) -> Json:
    """Return the schema of a value that may be null."""
    return {"anyOf": [schema, {"type": "null"}]}


_USAGE = object_of(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    {
        "prompt_tokens_details": object_of({"cached_tokens": COUNT}),
        "completion_tokens_details": object_of({"reasoning_tokens": COUNT}),
    },
)


def _call(kind: str, said: str) -> Json:
    return object_of(
        {"id": TEXT, "type": {"const": kind}, kind: object_of({"name": TEXT, said: TEXT})}
    )


_CALL: Json = {"anyOf": [_call("function", "arguments"), _call("custom", "input")]}
_HEAD: Json = {"id": TEXT, "created": COUNT, "model": TEXT}
_FINISH = maybe({"enum": ["stop", "length", "tool_calls", "content_filter"]})
_CHAT = object_of(
    {
        **_HEAD,
        "object": {"const": "chat.completion"},
        "choices": list_of(
            object_of(
                {
                    "index": COUNT,
                    "finish_reason": _FINISH,
                    "message": object_of(
                        {
                            "role": {"const": "assistant"},
                            "content": maybe(TEXT),
                            "refusal": maybe(TEXT),
                        },
                        {"tool_calls": list_of(_CALL)},
                    ),
                },
                {"logprobs": maybe({"type": "object"})},
            )
        ),
        "usage": _USAGE,
    }
)
_COMPLETION = object_of(
    {
        **_HEAD,
        "object": {"const": "text_completion"},
        "choices": list_of(
            object_of(
                {"index": COUNT, "text": TEXT, "finish_reason": _FINISH},
                {"logprobs": maybe({"type": "object"})},
            )
        ),
        "usage": _USAGE,
    }
)
_MESSAGE = object_of(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": list_of(object_of({"type": {"enum": ["text", "tool_use"]}})),
        "stop_reason": maybe(
            {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]}
        ),
        "stop_sequence": maybe(TEXT),
        "usage": object_of(
            {
                "input_tokens": COUNT,
                "cache_creation_input_tokens": COUNT,
                "cache_read_input_tokens": COUNT,
                "output_tokens": COUNT,
            }
        ),
    }
)
_RESPONSE = object_of(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": COUNT,
        "status": {
            "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        },
        "error": maybe(object_of({"code": TEXT, "message": TEXT})),
        "incomplete_details": maybe(object_of({"reason": TEXT})),
        "model": TEXT,
        "output": list_of(
            object_of({"id": TEXT, "type": {"enum": ["message", "function_call"]}, "status": TEXT})
        ),
        "usage": maybe(
            object_of({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT})
        ),
    }
)
_EMBEDDINGS = object_of(
    {
        "object": {"const": "list"},
        "model": TEXT,
        "data": list_of(
            object_of(
                {
                    "object": {"const": "embedding"},
                    "index": COUNT,
                    "embedding": {"anyOf": [list_of({"type": "number"}), TEXT]},
                }
            )
        ),
        "usage": object_of({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    }
)

ANSWERS: dict[str, tuple[str, Json]] = {
    "/v1/chat/completions": ("ChatAnswer", _CHAT),
    "/v1/completions": ("CompletionAnswer", _COMPLETION),
    "/v1/messages": ("MessageAnswer", _MESSAGE),
    "/v1/messages/count_tokens": ("CountAnswer", object_of({"input_tokens": COUNT})),
    "/v1/responses": ("ResponseAnswer", _RESPONSE),
    "/v1/responses/input_tokens": (
        "InputTokensAnswer",
        object_of({"object": {"const": "response.input_tokens"}, "input_tokens": COUNT}),
    ),
    "/v1/embeddings": ("EmbeddingsAnswer", _EMBEDDINGS),
    "/tokenize": (
        "TokenizeAnswer",
        object_of({"count": COUNT, "max_model_len": COUNT, "tokens": list_of(COUNT)}),
    ),
    "/v1/moderations": (
        "ModerationAnswer",
        object_of(
            {
                "id": TEXT,
                "model": TEXT,
                "results": list_of(
                    object_of(
                        {
                            "flagged": {"type": "boolean"},
                            "categories": {"type": "object"},
                            "category_scores": {"type": "object"},
                        }
                    )
                ),
            }
        ),
    ),
    "/detokenize": ("DetokenizeAnswer", object_of({"prompt": TEXT})),
}
