"""JSON schemas of the hot endpoints' whole answers, as the OpenAPI document shows them."""

from __future__ import annotations

from typing import Any

# Any: JSON schemas.
Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}


def _object(fields: Json, optional: Json | None = None) -> Json:
    """Return the schema of an object that has all *fields*, and maybe others."""
    return {
        "type": "object",
        "required": list(fields),
        "properties": {**fields, **(optional or {})},
    }


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _maybe(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


_USAGE = _object(
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
    {
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
    },
)
_CALL = _object(
    {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": _object({"name": _TEXT, "arguments": _TEXT}),
    }
)
_HEAD: Json = {"id": _TEXT, "created": _COUNT, "model": _TEXT}
_FINISH = _maybe({"enum": ["stop", "length", "tool_calls", "content_filter"]})
_CHAT = _object(
    {
        **_HEAD,
        "object": {"const": "chat.completion"},
        "choices": _list(
            _object(
                {
                    "index": _COUNT,
                    "finish_reason": _FINISH,
                    "message": _object(
                        {
                            "role": {"const": "assistant"},
                            "content": _maybe(_TEXT),
                            "refusal": _maybe(_TEXT),
                        },
                        {"tool_calls": _list(_CALL)},
                    ),
                },
                {"logprobs": _maybe({"type": "object"})},
            )
        ),
        "usage": _USAGE,
    }
)
_COMPLETION = _object(
    {
        **_HEAD,
        "object": {"const": "text_completion"},
        "choices": _list(
            _object(
                {"index": _COUNT, "text": _TEXT, "finish_reason": _FINISH},
                {"logprobs": _maybe({"type": "object"})},
            )
        ),
        "usage": _USAGE,
    }
)
_MESSAGE = _object(
    {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _TEXT,
        "content": _list(_object({"type": {"enum": ["text", "tool_use"]}})),
        "stop_reason": _maybe(
            {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]}
        ),
        "stop_sequence": _maybe(_TEXT),
        "usage": _object(
            {
                "input_tokens": _COUNT,
                "cache_creation_input_tokens": _COUNT,
                "cache_read_input_tokens": _COUNT,
                "output_tokens": _COUNT,
            }
        ),
    }
)
_RESPONSE = _object(
    {
        "id": _TEXT,
        "object": {"const": "response"},
        "created_at": _COUNT,
        "status": {
            "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        },
        "error": _maybe(_object({"code": _TEXT, "message": _TEXT})),
        "incomplete_details": _maybe(_object({"reason": _TEXT})),
        "model": _TEXT,
        "output": _list(
            _object({"id": _TEXT, "type": {"enum": ["message", "function_call"]}, "status": _TEXT})
        ),
        "usage": _maybe(
            _object({"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT})
        ),
    }
)
_EMBEDDINGS = _object(
    {
        "object": {"const": "list"},
        "model": _TEXT,
        "data": _list(
            _object(
                {
                    "object": {"const": "embedding"},
                    "index": _COUNT,
                    "embedding": {"anyOf": [_list({"type": "number"}), _TEXT]},
                }
            )
        ),
        "usage": _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
    }
)

ANSWERS: dict[str, tuple[str, Json]] = {
    "/v1/chat/completions": ("ChatAnswer", _CHAT),
    "/v1/completions": ("CompletionAnswer", _COMPLETION),
    "/v1/messages": ("MessageAnswer", _MESSAGE),
    "/v1/messages/count_tokens": ("CountAnswer", _object({"input_tokens": _COUNT})),
    "/v1/responses": ("ResponseAnswer", _RESPONSE),
    "/v1/embeddings": ("EmbeddingsAnswer", _EMBEDDINGS),
    "/detokenize": ("DetokenizeAnswer", _object({"prompt": _TEXT})),
}
