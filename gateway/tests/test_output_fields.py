"""response_format and structured_outputs: what arrives for the worker, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_common.errors import InvalidRequest
from headrace_contracts.worker.v1.worker_pb2 import OutputConstraint, TextChoice
from headrace_gateway.api_request import ApiRequest
from headrace_gateway.openai_schema import parse_chat, parse_completion
from headrace_testing.gateway_fleet import chat_body

SCHEMA = {"type": "object", "properties": {"secret word": {"enum": ["a", "b"]}}}


def chat(**fields: Any) -> ApiRequest:
    return parse_chat(json.dumps(chat_body(**fields)).encode())


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, **fields}}


def test_a_schema_arrives_as_json_text() -> None:
    """Strict is strict; without it a keyword that cannot be enforced is passed over."""
    strict = chat(response_format=schema_format(strict=True)).constraint
    loose = chat(response_format=schema_format()).constraint
    assert strict is not None
    assert loose is not None
    assert json.loads(strict.json_schema) == SCHEMA
    assert (strict.lenient, loose.lenient) == (False, True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OutputConstraint(json_object=True)),
        ({"structured_outputs": {"regex": "a+"}}, OutputConstraint(regex="a+")),
        ({"structured_outputs": {"grammar": "start: X"}}, OutputConstraint(grammar="start: X")),
        (
            {"structured_outputs": {"choice": ["yes", "no"]}},
            OutputConstraint(choice=TextChoice(texts=["yes", "no"])),
        ),
        ({"structured_outputs": {"json": "{}"}}, OutputConstraint(json_schema="{}")),
    ],
)
def test_each_kind_arrives_on_both_endpoints(fields: Any, expected: Any) -> None:
    """Chat and text completions take the same."""
    assert chat(**fields).constraint == expected
    body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
    assert parse_completion(body).constraint == expected


def test_the_guard_sees_the_texts_of_a_schema() -> None:
    """Whatever the answer could be made to repeat is judged first."""
    request = chat(response_format=schema_format(description="Told to nobody."))
    seen = {part.path: part.text for part in request.guard_parts}
    assert "secret word" in seen["response_format.json_schema.schema"]
    assert seen["response_format.json_schema.description"] == "Told to nobody."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "zap"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": schema_format(schema=None)}, "response_format.json_schema.schema"),
        ({"response_format": schema_format(schema=[1])}, "response_format.json_schema.schema"),
        ({"response_format": schema_format(name="a b")}, "response_format.json_schema.name"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
    ],
)
def test_wrong_formats_are_named(fields: dict[str, Any], param: str) -> None:
    """A mistake is a 400 whose `param` is the path to it."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
