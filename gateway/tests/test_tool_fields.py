"""Tools of a chat request: what arrives, what the guard sees, what is refused by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_common.errors import InvalidRequest
from headrace_gateway.api_request import ApiRequest, ToolMode
from headrace_gateway.openai_schema import parse_chat
from headrace_testing.gateway_fleet import chat_body

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where to look."}},
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "clock", "strict": True}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def chat(**fields: Any) -> ApiRequest:
    return parse_chat(json.dumps(chat_body(**fields)).encode())


def test_tools_arrive_as_templates_see_them() -> None:
    """Names, descriptions and schemas are kept; without parameters a function takes none."""
    tools = chat(tools=[WEATHER, CLOCK]).tools
    assert tools is not None
    assert tools.functions[0] == WEATHER
    assert tools.functions[1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert (tools.mode, tools.is_parallel, tools.is_offered) == (ToolMode.AUTO, True, True)
    assert [function["name"] for function in tools.callable_functions()] == ["weather", "clock"]


@pytest.mark.parametrize(
    ("choice", "mode", "callable_names"),
    [
        ("auto", ToolMode.AUTO, ["weather", "clock"]),
        ("required", ToolMode.REQUIRED, ["weather", "clock"]),
        ("none", ToolMode.NONE, ["weather", "clock"]),
        (
            {"type": "function", "function": {"name": "clock"}},
            ToolMode.REQUIRED,
            ["clock"],
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "clock"}}],
                },
            },
            ToolMode.AUTO,
            ["clock"],
        ),
    ],
)
def test_choices_say_what_may_be_called(
    choice: Any, mode: ToolMode, callable_names: list[str]
) -> None:
    """auto, none, required, a named function, a selection."""
    tools = chat(tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False).tools
    assert tools is not None
    assert (tools.mode, tools.is_parallel) == (mode, False)
    assert [function["name"] for function in tools.callable_functions()] == callable_names


def test_the_guard_sees_every_text_of_a_tool() -> None:
    """Name, description, texts and keys of the schema; a description can be redacted."""
    request = chat(tools=[WEATHER])
    seen = {part.path: part.text for part in request.guard_parts}
    assert seen["tools[0].function.name"] == "weather"
    assert "Where to look." in seen["tools[0].function.parameters"]
    assert "city" in seen["tools[0].function.parameters"]
    idx = [part.path for part in request.guard_parts].index("tools[0].function.description")
    request.redact({idx: "***"})
    assert request.tools is not None
    assert request.tools.functions[0]["function"]["description"] == "***"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "zap"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "clock"}},
            },
            "tool_choice",
        ),
        ({"tools": [WEATHER], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        (
            {"content": [{"role": "tool", "tool_call_id": "c1", "content": "x"}]},
            "messages[0].tool_call_id",
        ),
    ],
)
def test_wrong_tools_are_named(fields: dict[str, Any], param: str) -> None:
    """A mistake in a tool is a 400 whose `param` is the path to it."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


def test_a_result_answers_an_earlier_call() -> None:
    """The id is what joins them."""
    request = chat(
        content=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]
    )
    assert request.messages[2]["tool_call_id"] == "c1"
