"""Custom tools: a model is told of functions, the client of inputs that are texts."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from headrace_common.errors import InvalidRequest
from headrace_contracts.guard.v1 import guard_pb2
from headrace_gateway.openai_schema import parse_chat
from headrace_gateway.responses_api import schema as responses
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body

SAY: Any = [{"role": "user", "content": "Add a file."}]
LARK = 'start: "*** Begin" /(.*)/'
GRAMMAR = {"syntax": "lark", "definition": LARK}
PATCH: Any = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": GRAMMAR},
    },
}
CODE: Any = {"type": "custom", "custom": {"name": "code", "description": "Runs code."}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
FLAT_PATCH: Any = {
    **PATCH["custom"],
    "type": "custom",
    "format": {"type": "grammar", **GRAMMAR},
}
FLAT_CODE: Any = {"type": "custom", **CODE["custom"]}
INPUT = '*** Begin\n+print("é")\n'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
CODE_ARGUMENTS = json.dumps({"input": INPUT})
CODE_CALL = f'<tool_call>\n{{"name": "code", "arguments": {CODE_ARGUMENTS}}}\n</tool_call>'
PATCH_CALL = f'<tool_call>\n{{"name": "patch", "arguments": {INPUT}'


def prompt(fleet: GatewayFleet) -> str:
    """The last prompt, control tokens left out."""
    return bytes(i for i in fleet.worker.requests[-1].prompt_token_ids if i < 256).decode()


@pytest.mark.parametrize(("name", "call"), [("code", CODE_CALL), ("patch", PATCH_CALL)])
async def test_chat_tells_an_input_as_it_is(fleet: GatewayFleet, name: str, call: str) -> None:
    """Beside a function, whole and streamed alike."""
    fleet.worker.script = saying("I look.\n" + CLOCK_CALL + call)
    asked: Any = {"model": MODEL, "messages": SAY, "tools": [CLOCK, PATCH, CODE]}
    async with fleet.openai() as client:
        answer = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        chunks: list[Any] = [chunk.to_dict() async for chunk in stream]
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert choice.message.tool_calls is not None
    clock, custom = choice.message.tool_calls
    assert clock.type == "function"
    assert custom.type == "custom"
    assert (custom.custom.name, custom.custom.input) == (name, INPUT)
    told = [
        call
        for chunk in chunks
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
        if call["index"] == 1
    ]
    assert (told[0]["type"], told[0]["custom"]) == ("custom", {"name": name, "input": ""})
    assert len(told) > 3
    assert "".join(call["custom"]["input"] for call in told) == INPUT
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("name", "call"), [("code", CODE_CALL), ("patch", PATCH_CALL)])
async def test_a_response_tells_an_input_by_its_own_events(
    fleet: GatewayFleet, name: str, call: str
) -> None:
    """Item, deltas, done, each as the SDK types it; the answer repeats the tools."""
    fleet.worker.script = saying(call)
    tools: Any = [FLAT_PATCH, FLAT_CODE]
    async with fleet.openai() as client:
        stream = await client.responses.create(model=MODEL, input="hi", tools=tools, stream=True)
        events: list[Any] = [event async for event in stream]
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    of_input = "response.custom_tool_call_input"
    added, done = (kinds.index(f"response.output_item.{it}") for it in ("added", "done"))
    assert set(kinds[added + 1 : done - 1]) == {f"{of_input}.delta"}
    assert kinds[done - 1] == f"{of_input}.done"
    deltas = [event.delta for event in events if event.type == f"{of_input}.delta"]
    assert "".join(deltas) == events[done - 1].input == INPUT
    made = events[-1].response
    (item,) = made.output
    assert isinstance(item, openai.types.responses.ResponseCustomToolCall)
    assert (item.name, item.input) == (name, INPUT)
    assert item == events[done].item
    assert {event.item_id for event in events[added + 1 : done]} == {item.id}
    assert (events[added].item.id, events[added].item.input) == (item.id, "")
    patch, code = (tool.to_dict() for tool in made.tools)
    assert patch == FLAT_PATCH
    assert code == {**FLAT_CODE, "format": {"type": "text"}}


async def test_the_worker_holds_an_input_to_its_grammar(fleet: GatewayFleet) -> None:
    """Lark and regex as they are; free text as one string."""
    grammar = {"syntax": "regex", "definition": "[a-z]+"}
    word = {"name": "word", "format": {"type": "grammar", "grammar": grammar}}
    tools = [CODE, PATCH, {"type": "custom", "custom": word}]
    async with fleet.http() as client:
        body = chat_body(SAY, tools=tools, max_tokens=...)
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    code, patch, said = fleet.worker.requests[-1].constraint.tool_calls.functions
    assert (patch.grammar, said.regex) == (LARK, "[a-z]+")
    assert json.loads(code.arguments_schema)["required"] == ["input"]
    shown = prompt(fleet)
    assert all(text in shown for text in ("Edits files.", "*** Begin", "[a-z]+", "Runs code."))


@pytest.mark.parametrize("name", ["code", "patch"])
async def test_a_model_is_shown_an_earlier_input_as_it_wrote_it(
    fleet: GatewayFleet, name: str
) -> None:
    """By both endpoints the same prompt, with what the tool said."""
    call = {"id": "c1", "type": "custom", "custom": {"name": name, "input": INPUT}}
    said = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    messages: Any = [*SAY, {"role": "assistant", "tool_calls": [call]}, said]
    item = {"type": "custom_tool_call", "call_id": "c1", "name": name, "input": INPUT}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    items: Any = [*SAY, item, output]
    async with fleet.openai() as client:
        await client.chat.completions.create(model=MODEL, messages=messages, tools=[CODE, PATCH])
        shown = prompt(fleet)
        tools: Any = [FLAT_CODE, FLAT_PATCH]
        made = await client.responses.create(model=MODEL, input=items, tools=tools)
        assert prompt(fleet) == shown
        listed = await client.responses.input_items.list(made.id, order="asc")
    arguments = INPUT if name == "patch" else json.dumps({"input": INPUT}, ensure_ascii=False)
    assert f'"name": "{name}", "arguments": {arguments}' in shown
    assert "done" in shown
    kept = [it.to_dict() for it in listed.data][1:]
    assert [it["type"] for it in kept] == ["custom_tool_call", "custom_tool_call_output"]
    assert kept[0]["input"] == INPUT


async def test_a_custom_tool_of_a_namespace_is_called_by_both_names(fleet: GatewayFleet) -> None:
    """As functions are."""
    fleet.worker.script = saying(CODE_CALL.replace("code", "box__code"))
    box: Any = {"type": "namespace", "name": "box", "description": "A box.", "tools": [FLAT_CODE]}
    async with fleet.openai() as client:
        made: Any = await client.responses.create(model=MODEL, input="hi", tools=[box])
    (item,) = made.output
    assert (item.type, item.namespace, item.name) == ("custom_tool_call", "box", "code")
    assert made.tools[0].tools[0].type == "custom"


async def test_a_choice_names_a_custom_tool(fleet: GatewayFleet) -> None:
    """By its name, or as one of a selection; by the wrong kind it is not there."""
    named = {"type": "custom", "custom": {"name": "patch"}}
    selection = {"mode": "required", "tools": [named]}
    for choice in (named, {"type": "allowed_tools", "allowed_tools": selection}):
        async with fleet.http() as client:
            body = chat_body(SAY, tools=[CLOCK, CODE, PATCH], tool_choice=choice, max_tokens=...)
            await client.post("/v1/chat/completions", json=body)
        rules = fleet.worker.requests[-1].constraint.tool_calls
        assert rules.required
        assert [function.name for function in rules.functions] == ["patch"]
    flat_choice = {"type": "custom", "name": "patch"}
    asked = {"model": "m", "input": "x", "tools": [FLAT_PATCH], "tool_choice": flat_choice}
    flat = responses.parse(json.dumps(asked).encode())
    tools = responses.read(flat, []).tools
    assert tools is not None
    assert tools.allowed == {"patch"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [CODE, {"type": "custom", "custom": {"name": "code"}}]}, "tools"),
        (
            {"tools": [CODE], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            "tool_choice",
        ),
        (
            {"tools": [CODE], "tool_choice": {"type": "function", "function": {"name": "code"}}},
            "tool_choice",
        ),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "custom", "custom": {"name": "clock"}}},
            "tool_choice",
        ),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "custom": {
                            "name": "x",
                            "format": {
                                "type": "grammar",
                                "grammar": {"syntax": "gbnf", "definition": "x"},
                            },
                        },
                    }
                ]
            },
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            {
                "content": [
                    *SAY,
                    {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]},
                ]
            },
            "messages[1].tool_calls[0].custom",
        ),
        (
            {
                "content": [
                    *SAY,
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "c", "type": "function", "custom": {"name": "x", "input": ""}}
                        ],
                    },
                ]
            },
            "messages[1].tool_calls[0].function",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    """A 400 whose `param` is the path to it."""
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(json.dumps(chat_body(**fields)).encode())
    assert caught.value.param == param


async def test_the_guard_sees_every_text_by_the_clients_names(fleet: GatewayFleet) -> None:
    """Description with grammar, and inputs; of a response by its own paths."""
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "code", "input": "rm -rf"}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "gone"}
    asked = {"model": "m", "input": [call, output], "tools": [FLAT_PATCH, FLAT_CODE]}
    request = responses.read(responses.parse(json.dumps(asked).encode()), [])
    seen = {part.path: part for part in request.guard_parts}
    assert LARK in seen["tools[0].description"].text
    assert seen["tools[1].description"].text == "Runs code."
    assert "rm -rf" in seen["input[0].input"].text
    assert seen["input[0].input"].trust == guard_pb2.TRUST_MODEL
    assert seen["input[1].output"].trust == guard_pb2.TRUST_UNTRUSTED
    request.redact({[it.path for it in request.guard_parts].index("tools[1].description"): "***"})
    assert request.tools is not None
    assert request.tools.functions[1]["function"]["description"] == "***"
