"""Tools of /v1/responses as agents list them: functions, namespaces, and what nobody runs here."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any

import openai
import pytest

from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet

CLOSE = {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}}
AGENTS = {"type": "namespace", "name": "agents", "description": "About agents.", "tools": [CLOSE]}
CALL = {"type": "function_call", "call_id": "c1", "name": "close", "arguments": "{}"}
DEEP: Any = reduce(lambda inner, _: {"properties": {"a": inner}}, range(40), {})
SEARCH = {"type": "web_search", "external_web_access": False}


def seen(fleet: GatewayFleet) -> str:
    """The last prompt, control tokens left out."""
    return bytes(i for i in fleet.worker.requests[-1].prompt_token_ids if i < 256).decode()


def calling(name: str) -> Any:
    return saying(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')


async def test_a_function_in_a_namespace_is_called_by_both_names(fleet: GatewayFleet) -> None:
    """Also while it streams; the plain function of the same name is another one."""
    fleet.worker.script = calling("agents__close")
    tools: Any = [CLOSE, AGENTS]
    async with fleet.openai() as client:
        made = await client.responses.create(model=MODEL, input="hi", tools=tools)
        stream = await client.responses.create(model=MODEL, input="hi", tools=tools, stream=True)
        events: list[Any] = [event async for event in stream]
        (call,) = made.output
        assert isinstance(call, openai.types.responses.ResponseFunctionToolCall)
        assert (call.namespace, call.name, call.arguments) == ("agents", "close", "{}")
        told = [e.item for e in events if e.type.startswith("response.output_item")]
        assert {(item.namespace, item.name) for item in told} == {("agents", "close")}
        fleet.worker.script = calling("close")
        made = await client.responses.create(model=MODEL, input="hi", tools=tools)
    (plain,) = made.output
    assert isinstance(plain, openai.types.responses.ResponseFunctionToolCall)
    assert (plain.namespace, plain.name) == (None, "close")


async def test_the_model_sees_a_namespace_once(fleet: GatewayFleet) -> None:
    """Its description stands at its first function, and earlier calls carry the name shown."""
    shut = {**CLOSE, "name": "shut", "description": "Shuts."}
    output = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    items: Any = [{"role": "user", "content": "hi"}, {**CALL, "namespace": "agents"}, output]
    tools: Any = [{**AGENTS, "tools": [CLOSE, shut]}]
    async with fleet.openai() as client:
        made: Any = await client.responses.create(model=MODEL, input=items, tools=tools)
    listed = [json.loads(line) for line in seen(fleet).splitlines() if '"parameters"' in line]
    functions = [(it["function"]["name"], it["function"]["description"]) for it in listed]
    assert functions == [("agents__close", "About agents."), ("agents__shut", "Shuts.")]
    assert '"name": "agents__close", "arguments": {}' in seen(fleet)
    (told,) = made.tools
    assert told.type == "namespace"
    assert [tool.name for tool in told.tools] == ["close", "shut"]


async def test_what_the_server_would_run_is_passed_over_beside_functions(
    fleet: GatewayFleet,
) -> None:
    """The answer's own list says what the model was shown."""
    found = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
    tools: Any = [SEARCH, CLOSE, found]
    async with fleet.openai() as client:
        made = await client.responses.create(model=MODEL, input="hi", tools=tools)
    assert [tool.type for tool in made.tools] == ["function"]
    assert "_search" not in seen(fleet)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [SEARCH]}, "tools[0].type"),
        ({"tools": [SEARCH, CLOSE], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [CLOSE, {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
        ({"tools": [SEARCH, {**AGENTS, "tools": [{"type": "mcp"}]}]}, "tools[1].tools[0].type"),
        ({"tools": [SEARCH, {**AGENTS, "tools": [{"type": "custom"}]}]}, "tools[1].tools[0].name"),
        ({"tools": [{**AGENTS, "tools": [{**CLOSE, "strict": 1}]}]}, "tools[0].tools[0].strict"),
        ({"tools": [AGENTS, {**CLOSE, "name": "agents__close"}]}, "tools"),
        (
            {"tools": [SEARCH, {**AGENTS, "tools": [{**CLOSE, "parameters": DEEP}]}]},
            "tools[1].tools[0].parameters",
        ),
    ],
)
async def test_what_cannot_be_offered_is_named_as_the_client_wrote_it(
    fleet: GatewayFleet, fields: Any, param: str
) -> None:
    """Also behind tools that are passed over."""
    async with fleet.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="hi", **fields)
    assert caught.value.param == param


async def test_what_codex_says_of_itself_is_let_pass(fleet: GatewayFleet) -> None:
    """Fields that it always sends and that no answer depends on."""
    hints: Any = {
        "client_metadata": {"session_id": "s", "turn": {"nested": 1}},
        "prompt_cache_key": "s",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "store": False,
    }
    async with fleet.openai() as client:
        made = await client.responses.create(model=MODEL, input="hi", extra_body=hints)
        assert made.status == "completed"
        prompt = seen(fleet)
        await client.responses.create(model=MODEL, input="hi")
    assert seen(fleet) == prompt
