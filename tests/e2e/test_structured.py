"""Tools and schemas end to end, with the real model: it is small, so form is checked, not sense."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from headrace_testing.processes import Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}}
]
ASK: Any = [{"role": "user", "content": "Is it warm in Bonn?"}]


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    key = fleet.create_key("structured")
    with openai.OpenAI(base_url=f"{fleet.base_url}/v1", api_key=key.api_key, max_retries=0) as sdk:
        yield sdk


def test_an_answer_obeys_its_schema(fleet: Fleet, client: openai.OpenAI) -> None:
    for temperature in (0.0, 1.5):
        answer = client.chat.completions.create(
            model=fleet.model,
            messages=ASK,
            temperature=temperature,
            max_tokens=150,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "place", "strict": True, "schema": PLACE},
            },
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), PLACE)


def test_a_required_call_is_streamed_and_its_result_taken(
    fleet: Fleet, client: openai.OpenAI
) -> None:
    stream = client.chat.completions.create(
        model=fleet.model,
        messages=ASK,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=150,
        stream=True,
    )
    calls: list[Any] = []
    arguments, reasons = "", []
    for chunk in stream:
        (choice,) = chunk.choices
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or ():
            calls += [call] if call.id else []
            arguments += (call.function and call.function.arguments) or ""
    assert reasons == ["tool_calls"]
    (call,) = calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(arguments), PLACE)
    history: Any = [
        *ASK,
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": "weather", "arguments": arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "24 degrees"},
    ]
    after = client.chat.completions.create(
        model=fleet.model, messages=history, tools=TOOLS, max_tokens=20
    )
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")


EDIT = 'start: "*** Edit" LF ("+" /[a-z"]{1,8}/ LF){2} "*** End"\n%import common.LF'


def test_an_input_obeys_its_grammar_and_is_told_as_it_is(
    fleet: Fleet, client: openai.OpenAI
) -> None:
    """Streamed as its own events; the model goes on from it and from what the tool said."""
    edit: Any = {
        "type": "custom",
        "name": "edit",
        "format": {"type": "grammar", "syntax": "lark", "definition": EDIT},
    }
    stream = client.responses.create(
        model=fleet.model,
        input="Add two lines.",
        tools=[edit],
        tool_choice={"type": "custom", "name": "edit"},
        temperature=1.5,
        max_output_tokens=150,
        stream=True,
    )
    events: list[Any] = list(stream)
    (call,) = events[-1].response.output
    deltas = [it.delta for it in events if it.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input
    assert re.fullmatch(r'\*\*\* Edit\n(\+[a-z"]{1,8}\n){2}\*\*\* End', call.input)
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    after = client.responses.create(
        model=fleet.model,
        input=[output],
        tools=[edit],
        previous_response_id=events[-1].response.id,
        max_output_tokens=20,
    )
    assert after.status in ("completed", "incomplete")


def test_a_grammar_that_is_none_is_refused_with_its_mistake(
    fleet: Fleet, client: openai.OpenAI
) -> None:
    grammar = {"syntax": "lark", "definition": "start: nothing"}
    custom: Any = {"name": "x", "format": {"type": "grammar", "grammar": grammar}}
    with pytest.raises(openai.BadRequestError, match="nothing") as caught:
        client.chat.completions.create(
            model=fleet.model, messages=ASK, tools=[{"type": "custom", "custom": custom}]
        )
    assert caught.value.param == "tools"


def test_a_hostile_schema_is_refused_before_the_stream(fleet: Fleet, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=fleet.model,
            messages=ASK,
            stream=True,
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "bad",
                    "strict": True,
                    "schema": {"enum": [f"value {idx}" for idx in range(30_000)]},
                },
            },
        )
    assert caught.value.code in ("invalid_json_schema", "invalid_request")
