"""The whole worker over the real model: any temperature gives JSON that obeys the schema."""

import asyncio
import json

import jsonschema
import orjson
import pytest

from headrace_common.clock import SystemClock
from headrace_common.metrics import new_registry
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.app import WorkerApp
from headrace_worker.settings import WorkerSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GENERATE = method_ref(
    pb.DESCRIPTOR.services_by_name["Worker"], "Generate", pb.GenerateRequest, pb.GenerateEvent
)
# Ids of a short chat that asks for JSON; any prompt would do.
PROMPT = [1, 4093, 198, 28783, 281, 10887, 30, 2, 198, 1, 520, 9531, 198]
SHORT = {"type": "string", "maxLength": 12}
SCHEMAS = [
    {"type": "boolean"},
    {"enum": ["red", "grün", 3, None]},
    {"type": "integer", "minimum": -5, "maximum": 300},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 4},
    {
        "type": "object",
        "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"kind": {"const": "a"}, "x": {"anyOf": [{"type": "null"}, SHORT]}},
        "required": ["kind", "x"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "type": "array",
        "items": {"$ref": "#/$defs/node"},
        "minItems": 1,
        "maxItems": 2,
    },
]


@pytest.fixture(scope="module")
def checked(smollm2_gguf):
    """Run all of it against one worker; starting one for each test would take longer than they."""
    return asyncio.run(_all_of_it(smollm2_gguf))


async def _all_of_it(model_path):
    settings = WorkerSettings.load(
        model_path=model_path, model_name="smollm2", kv_capacity_tokens=8192, drain_grace_s=0
    )
    app = WorkerApp(settings, SystemClock(), new_registry())
    try:
        await app.start()
        client = SessionClient(f"127.0.0.1:{app.port}")
        asked = [(schema, t) for schema in SCHEMAS for t in (0.0, 1.0, 2.0)]
        made = await asyncio.gather(*(_generate(client, _schema(s), t) for s, t in asked))
        resumed = await _resumed(client)
        called = await asyncio.gather(*(_generate(client, CALLS, t) for t in (0.0, 1.5)))
        await client.close()
    finally:
        await app.stop()
    return list(zip(asked, made, strict=True)), resumed, called


def _schema(schema):
    return pb.OutputConstraint(json_schema=json.dumps(schema))


CALLS = pb.OutputConstraint(
    tool_calls=pb.ToolCallRules(
        functions=[pb.CallableFunction(name="find", arguments_schema=json.dumps(SCHEMAS[6]))],
        required=True,
        max_calls=1,
        begin="<tool_call>",
        end="</tool_call>",
    )
)


async def _generate(client, constraint, temperature, resume=()):
    request = pb.GenerateRequest(
        request_id="schema",
        model="smollm2",
        prompt_token_ids=PROMPT,
        sampling=pb.Sampling(temperature=temperature),
        stopping=pb.Stopping(max_tokens=160),
        seed=11,
        constraint=constraint,
        resume=[pb.ResumeChoice(output_token_ids=resume)] if resume else [],
    )
    events = [event async for event in client.stream(GENERATE, request, timeout_s=240)]
    deltas = [delta for event in events for delta in event.deltas]
    tokens = [token_id for delta in deltas for token_id in delta.token_ids]
    return "".join(delta.text for delta in deltas), tokens, deltas[-1].finish_reason


async def _resumed(client):
    """The whole text of one request, and what two resumes in the middle of its JSON add."""
    constraint = _schema(SCHEMAS[6])
    whole, tokens, _ = await _generate(client, constraint, 1.0)
    rests = [
        await _generate(client, constraint, 1.0, resume=tokens[:at]) for at in (2, len(tokens) // 2)
    ]
    return whole, [text for text, _, _ in rests]


def test_any_temperature_gives_json_that_obeys_the_schema(checked):
    """Strict parsers read it, and a validator of its own agrees, unless max_tokens cut it."""
    made, _, _ = checked
    num_whole = 0
    for (schema, _), (text, _, finish) in made:
        if finish == pb.FINISH_REASON_LENGTH:
            continue
        num_whole += 1
        jsonschema.validate(orjson.loads(text), schema)
    assert num_whole >= len(made) - 3


def test_a_resumed_json_goes_on_as_it_would_have(checked):
    """Another worker rebuilds the state from the tokens made so far."""
    _, (whole, rests), _ = checked
    assert all(rest and whole.endswith(rest) for rest in rests)
    assert len(rests[0]) > len(rests[1])


def test_a_required_call_is_made(checked):
    """With arguments that obey the function's schema."""
    _, _, called = checked
    for text, _, finish in called:
        assert finish == pb.FINISH_REASON_STOP
        inner = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
        call = json.loads(inner)
        assert call["name"] == "find"
        jsonschema.validate(call["arguments"], SCHEMAS[6])
