"""No value at any place of a body makes the server fail: each is taken, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from headrace_gateway.openapi_examples import EXAMPLES
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet

# Beyond 64 bits, what cannot be a key of a table, and what is neither text nor number.
ODD: list[Any] = [2**64, -(2**63) - 1, [None], {"a": [None]}, True, "\0", "", None, 1e308]
# Beside the published examples: what they leave out, nested as deeply as it goes.
MORE: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "model": MODEL,
            "max_tokens": 2,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "user", "content": "u"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": 1}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {
                            "type": "object",
                            "properties": {"a": {"type": "integer", "maximum": 3, "enum": [1]}},
                            "required": ["a"],
                        },
                    },
                }
            ],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stream_options": {"include_usage": True},
            "stream": True,
            "logit_bias": {"5": 1},
            "metadata": {"a": "b"},
            "stop": ["x"],
        },
        {
            "model": MODEL,
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "u"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {}}}},
            },
        },
    ],
    "/v1/responses": [
        {
            "model": MODEL,
            "max_output_tokens": 16,
            "instructions": "i",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": ""}],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "tools": [
                {"type": "function", "name": "f", "parameters": {"type": "object", "a": {"b": 1}}},
                {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "web"}]},
                {"type": "web_search", "filters": {"a": 1}},
            ],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
            "metadata": {"a": "b"},
            "include": ["message.output_text.logprobs"],
            "reasoning": {"effort": "low"},
        }
    ],
    "/v1/messages": [
        {
            "model": MODEL,
            "max_tokens": 2,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "text", "text": "r"}],
                        }
                    ],
                },
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {}}}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "metadata": {"user_id": "x"},
            "thinking": {"type": "disabled"},
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        }
    ],
    "/v1/moderations": [{"input": [{"type": "text", "text": "x"}], "model": "headrace-guard"}],
}
PATHS = sorted({*EXAMPLES, *MORE})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:  # Any: JSON
    """Yield where values lie in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a body with another value at a place."""
    made = copy.deepcopy(body)
    at: Any = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return made


@pytest.mark.parametrize("path", PATHS)
async def test_odd_values_are_never_our_failure(fleet: GatewayFleet, path: str) -> None:
    """Every place of every example, with every odd value."""
    bodies = [it["value"] for it in EXAMPLES.get(path, {}).values()] + MORE.get(path, [])
    failed = []
    async with fleet.http() as client:
        for body in bodies:
            for place in places(body):
                for value in ODD:
                    odd = changed(body, place, value)
                    answer = await client.post(path, json=odd)
                    if answer.status_code >= 500 or b"server_error" in answer.content:
                        failed.append((place, value, answer.status_code, answer.text[:100]))
    assert failed == []
