"""The guard sees what the worker gets: every text, in every format, as it reaches the prompt."""

import json
from typing import Any

import pytest

from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.worker.v1.worker_pb2 import OutputConstraint, Sampling
from headrace_gateway.api_request import (
    ApiRequest,
    Endpoint,
    Limits,
    Message,
    StreamOptions,
    ToolUse,
)
from headrace_gateway.guard_parts import complete_guard_parts
from headrace_gateway.messages_api.schema import parse_messages
from headrace_gateway.responses_api import schema as responses


def request_of(messages: list[Message], **fields: Any) -> ApiRequest:
    """A request whose parser noted nothing for the guard."""
    return ApiRequest(
        Endpoint.RESPONSES, "m", Sampling(), Limits(None), StreamOptions(), messages, **fields
    )


def call(arguments: object) -> Message:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def seen(request: ApiRequest) -> dict[str, tuple[str, guard_pb2.Trust.ValueType]]:
    complete_guard_parts(request)
    return {part.path: (part.text, part.trust) for part in request.guard_parts}


@pytest.mark.parametrize(
    ("role", "trust"),
    [
        ("system", guard_pb2.TRUST_OWNER),
        ("developer", guard_pb2.TRUST_OWNER),
        ("user", guard_pb2.TRUST_USER),
        ("assistant", guard_pb2.TRUST_MODEL),
        ("tool", guard_pb2.TRUST_UNTRUSTED),
        ("document", guard_pb2.TRUST_UNTRUSTED),
    ],
)
def test_every_field_of_a_message_is_seen(role: str, trust: guard_pb2.Trust.ValueType) -> None:
    """Whatever the field is called, with the trust of the role; unknown roles get none."""
    message = {"role": role, "content": "one", "name": "two", "some_new_field": "three"}
    found = seen(request_of([message]))
    assert set(found.values()) == {("one", trust), ("two", trust), ("three", trust)}


def test_calls_are_seen_as_values_not_as_escaped_json() -> None:
    """An escape in a call's JSON is no way around the guard."""
    request = request_of([{"role": "assistant", "content": "", "tool_calls": [call({"a": "x"})]}])
    function = request.messages[0]["tool_calls"][0]["function"]
    slot = (function, "arguments")
    request.add_guarded("args", guard_pb2.TRUST_MODEL, r'{"a":"\u0078"}', slot)
    found = seen(request)
    assert found["args"] == ('{"a":"x"}', guard_pb2.TRUST_MODEL)
    assert found["messages[0].tool_calls[0].function.name"][0] == "f"


def test_values_with_json_escapes_are_seen_without_them_too() -> None:
    """A template may show them either way."""
    request = request_of([{"role": "assistant", "tool_calls": [call({"a": "wet\npaint"})]}])
    complete_guard_parts(request)
    assert any("wet\npaint" in part.text for part in request.guard_parts)


def test_tools_and_constraints_are_seen() -> None:
    """Names, descriptions, every text of a schema, a grammar."""
    function = {
        "name": "find",
        "description": "Finds birds.",
        "parameters": {"properties": {"kind": {"enum": ["heron"]}}},
    }
    request = request_of(
        [],
        tools=ToolUse([{"type": "function", "function": function}]),
        constraint=OutputConstraint(json_schema='{"title":"bittern"}'),
    )
    text = "\n".join(text for text, _ in seen(request).values())
    assert all(word in text for word in ("find", "Finds birds.", "heron", "bittern"))
    assert {trust for _, trust in seen(request).values()} == {guard_pb2.TRUST_OWNER}


def test_prompts_are_seen_and_redacted_in_place() -> None:
    """By the public name of the field."""
    request = request_of([])
    request.prompts = ["one", "two"]
    assert seen(request)["input[1]"] == ("two", guard_pb2.TRUST_USER)
    request.redact({1: "x"})
    assert request.prompts == ["one", "x"]


def test_what_a_parser_noted_is_not_seen_twice() -> None:
    """A second walk adds nothing either."""
    message = {"role": "user", "content": "hi"}
    request = request_of([message])
    request.add_guarded("my.path", guard_pb2.TRUST_USER, "hi", (message, "content"))
    complete_guard_parts(request)
    complete_guard_parts(request)
    assert [part.path for part in request.guard_parts] == ["my.path"]


def test_calls_and_results_keep_the_names_of_their_protocol() -> None:
    """What the guard blocks is named as the client wrote it, also where calls share a message."""
    calls = [
        {"type": "function_call", "call_id": it, "name": "f", "arguments": "{}"} for it in "ab"
    ]
    output = {"type": "function_call_output", "call_id": "a", "output": "rain"}
    asked = {"model": "m", "input": [{"role": "user", "content": "hi"}, *calls, output]}
    response = responses.read(responses.parse(json.dumps(asked).encode()), [])
    assert [part.path for part in response.guard_parts] == [
        "input[0].content",
        "input[1].call_id", "input[1].name", "input[1].arguments",
        "input[2].call_id", "input[2].name", "input[2].arguments",
        "input[3].output", "input[3].call_id",
    ]  # fmt: skip
    # Escaped in JSON, a text is judged twice: as the worker gets it, and as a template may show it.
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": "1\n2"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "rain"}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": "m", "max_tokens": 5, "system": "s", "messages": turns}
    message = parse_messages(json.dumps(body).encode())
    complete_guard_parts(message)
    assert [part.path for part in message.guard_parts] == [
        "system",
        "messages[0].content",
        "messages[1].content",
        "messages[1].content[1].id", "messages[1].content[1].name", "messages[1].content[1].input",
        "messages[2].content[0].content", "messages[2].content[0].tool_use_id",
        "messages[1].content[1].input",
    ]  # fmt: skip
