"""What the guard must see of a request: everything that a prompt is made of.

Parsers note texts with their public paths as they meet them. This walk over the finished request
makes that exact and complete for every format: what a parser noted differently (a call's arguments
as JSON text, where the worker gets the values) is put right, what it did not note is added, with
the trust of its role. A new endpoint that parses into `ApiRequest` needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from headrace_contracts.guard.v1 import guard_pb2
from headrace_gateway.api_request import ApiRequest, Slot
from headrace_gateway.tool_fields import json_texts

TRUST_BY_ROLE = {
    "system": guard_pb2.TRUST_OWNER,
    "developer": guard_pb2.TRUST_OWNER,
    "user": guard_pb2.TRUST_USER,
    "assistant": guard_pb2.TRUST_MODEL,
    "tool": guard_pb2.TRUST_UNTRUSTED,
}
_Place = tuple[str, guard_pb2.Trust.ValueType, Slot]


def complete_guard_parts(request: ApiRequest) -> None:
    """Make the request's guarded parts be all that goes to a worker. May be called again."""
    noted = {(id(slot[0]), slot[1]): idx for idx, slot in enumerate(request.guard_slots) if slot}
    has_values = False
    for path, trust, slot in _places(request):
        container, key = slot
        value = container[key]
        if not isinstance(value, str):
            value, has_values = _judged_text(value), True
        idx = noted.get((id(container), key))
        if idx is None:
            request.add_guarded(path, trust, value, slot)
        elif request.guard_parts[idx].text != value:
            request.guard_parts[idx].text = value
    if has_values or request.tools is not None or request.constraint is not None:
        _add_rest(request)


def _places(request: ApiRequest) -> Iterator[_Place]:
    for idx, message in enumerate(request.messages):
        trust = TRUST_BY_ROLE.get(message["role"], guard_pb2.TRUST_UNTRUSTED)
        path = f"messages[{idx}]"
        for key, value in message.items():
            if key == "tool_calls":
                for call_idx, call in enumerate(value):
                    where = f"{path}.tool_calls[{call_idx}]"
                    yield f"{where}.id", trust, (call, "id")
                    yield f"{where}.function.name", trust, (call["function"], "name")
                    yield f"{where}.function.arguments", trust, (call["function"], "arguments")
            elif key != "role" and value:
                yield f"{path}.{key}", trust, (message, key)
    for idx, prompt in enumerate(request.prompts):
        if isinstance(prompt, str):
            field = request.endpoint.prompt_field
            yield f"{field}[{idx}]", guard_pb2.TRUST_USER, (request.prompts, idx)


def _add_rest(request: ApiRequest) -> None:
    """Add definitions that no parser noted; they cannot be redacted in place."""
    seen = {part.text for part in request.guard_parts}
    for path, text in _definitions(request):
        if text not in seen:
            request.add_guarded(path, guard_pb2.TRUST_OWNER, text, None)
    for path, trust, (container, key) in _places(request):
        value = container[key]
        # Templates may show values without JSON's escapes.
        if not isinstance(value, str) and "\\" in _judged_text(value):
            text = json_texts(value)
            if text not in seen:
                request.add_guarded(path, trust, text, None)


def _definitions(request: ApiRequest) -> Iterator[tuple[str, str]]:
    for idx, tool in enumerate(request.tools.functions if request.tools else ()):
        function = tool["function"]
        for key in ("name", "description"):
            yield f"tools[{idx}].function.{key}", function.get(key, "")
        yield f"tools[{idx}].function.parameters", json_texts(function.get("parameters"))
    constraint = request.constraint
    if constraint is None:
        return
    kind = constraint.WhichOneof("kind")
    if kind == "json_schema":
        yield "response_format", json_texts(orjson.loads(constraint.json_schema))
    elif kind == "choice":
        yield "structured_outputs", json_texts(list(constraint.choice.texts))
    elif kind in ("regex", "grammar"):
        yield "structured_outputs", getattr(constraint, kind)


def _judged_text(value: Any) -> str:  # Any: a JSON value, as templates see it
    """Return a value as the worker will see it, JSON's own escapes undone."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()
