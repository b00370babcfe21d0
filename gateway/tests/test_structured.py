"""Tools and formats over HTTP, with the SDK that applications use."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from headrace_contracts.guard.v1 import guard_pb2
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body

SAY: Any = [{"role": "user", "content": "Weather in Bonn and Köln?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]


def spelled(city: str) -> str:
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


TWO_CALLS = f"I look.\n{spelled('Bonn')}\n{spelled('Köln')}"


async def test_a_whole_answer_with_calls(fleet: GatewayFleet) -> None:
    """Text, calls with ids of their own, and the reason tool_calls."""
    fleet.worker.script = saying(TWO_CALLS)
    async with fleet.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=SAY, tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    calls = choice.message.tool_calls
    assert calls is not None
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Bonn", "Köln"]  # type: ignore[union-attr]
    assert len({call.id for call in calls}) == 2


async def test_streamed_calls_equal_the_whole_ones(fleet: GatewayFleet) -> None:
    """Index, id and name first, then pieces of the arguments; nothing of the spelling as text."""
    fleet.worker.script = saying(TWO_CALLS)
    async with fleet.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=SAY, tools=TOOLS, stream=True
        )
        chunks = [chunk async for chunk in stream]
    text, calls = "", dict[int, list[str]]()
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or ():
            assert call.function is not None
            if call.index not in calls:
                assert call.id is not None
                assert call.id.startswith("call_")
                assert call.function.name == "weather"
                calls[call.index] = []
            else:
                assert call.id is None
            calls[call.index].append(call.function.arguments or "")
    assert text == "I look."
    assert [json.loads("".join(parts))["city"] for parts in calls.values()] == ["Bonn", "Köln"]
    assert all(len(parts) > 2 for parts in calls.values())
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        "tool_calls"
    ]


@pytest.mark.parametrize(
    ("fields", "required", "names", "max_calls"),
    [
        ({}, False, ["weather", "clock"], 16),
        ({"tool_choice": "required"}, True, ["weather", "clock"], 16),
        ({"parallel_tool_calls": False}, False, ["weather", "clock"], 1),
        (
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
            True,
            ["clock"],
            1,
        ),
    ],
)
async def test_the_worker_is_told_what_may_be_called(
    fleet: GatewayFleet, fields: Any, required: bool, names: list[str], max_calls: int
) -> None:
    """By the contract; the prompt names all functions."""
    async with fleet.http() as client:
        response = await client.post(
            "/v1/chat/completions", json=chat_body(SAY, tools=TOOLS, max_tokens=..., **fields)
        )
    assert response.status_code == 200
    (seen,) = fleet.worker.requests
    rules = seen.constraint.tool_calls
    assert (rules.required, rules.max_calls) == (required, max_calls)
    assert [function.name for function in rules.functions] == names
    prompt = bytes(i for i in seen.prompt_token_ids if i < 256).decode()
    assert "Tells the weather." in prompt
    assert '"clock"' in prompt
    if required:
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"]["name"] == names[0]


async def test_tool_choice_none_means_no_tools(fleet: GatewayFleet) -> None:
    """They are not shown, and what looks like a call is text."""
    fleet.worker.script = saying(spelled("Bonn"))
    async with fleet.openai() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=SAY, tools=TOOLS, tool_choice="none"
        )
    assert answer.choices[0].message.content == spelled("Bonn")
    assert answer.choices[0].finish_reason == "stop"
    assert not fleet.worker.requests[0].HasField("constraint")


async def test_a_call_and_its_result_go_back_to_the_model(fleet: GatewayFleet) -> None:
    """The second turn of every agent: what the SDK returned is accepted as history."""
    fleet.worker.script = saying(spelled("Bonn"))
    async with fleet.openai() as client:
        first = await client.chat.completions.create(model=MODEL, messages=SAY, tools=TOOLS)
        message = first.choices[0].message
        assert message.tool_calls
        result: Any = {
            "role": "tool",
            "tool_call_id": message.tool_calls[0].id,
            "content": "It rains.",
        }
        history: Any = [*SAY, message, result]
        await client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    prompt = bytes(i for i in fleet.worker.requests[1].prompt_token_ids if i < 256).decode()
    assert spelled("Bonn") in prompt
    assert "<tool_response>\nIt rains.\n</tool_response>" in prompt
    seen = {part.path: part.trust for part in fleet.guard.inputs[-1].parts}
    assert seen["messages[2].content"] == guard_pb2.TRUST_UNTRUSTED
    assert seen["messages[1].tool_calls[0].function.arguments"] == guard_pb2.TRUST_MODEL


async def test_the_output_guard_sees_the_arguments_of_calls(fleet: GatewayFleet) -> None:
    """A word that it blocks does not leave as an argument either."""
    fleet.worker.script = saying(spelled("FORBIDDEN"))
    fleet.guard.blocklist.append("FORBIDDEN")
    async with fleet.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=SAY, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "content_filter"
    assert "FORBID" not in choice.model_dump_json()


async def test_a_schema_reaches_the_worker_and_parses_in_the_sdk(fleet: GatewayFleet) -> None:
    """response_format as the SDK's helpers send it."""
    fleet.worker.script = saying('{"city": "Bonn"}')
    async with fleet.openai() as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=SAY,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "place", "strict": True, "schema": {"type": "object"}},
            },
        )
    assert json.loads(answer.choices[0].message.content or "") == {"city": "Bonn"}
    constraint = fleet.worker.requests[0].constraint
    assert (constraint.json_schema, constraint.lenient) == ('{"type":"object"}', False)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "zap"}},
                }
            },
            "response_format",
            "invalid_json_schema",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "invalid_json_schema"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "zap"}}}
                ]
            },
            "tools",
            "invalid_function_parameters",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_worker_refuses_has_the_clients_name(
    fleet: GatewayFleet, fields: Any, param: str, code: str, stream: bool
) -> None:
    """A 400 before the stream opens, and the request is closed without a cost."""
    async with fleet.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model=MODEL, messages=SAY, stream=stream, extra_body=fields
            )
    assert (caught.value.param, caught.value.code) == (param, code)
    await fleet.settled()
    assert fleet.usage.closed_events()[0].amount_nano_usd == 0
