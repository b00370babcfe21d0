"""Constraints become grammars; what is too large is refused before one is built."""

import json

import pytest

from headrace_common.errors import InvalidRequest
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.constraints.grammar_text import grammar_text


def schema(value):
    return pb.OutputConstraint(json_schema=json.dumps(value))


def nested(depth):
    value = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"v": value}}
    return value


def calls(*functions, **fields):
    rules = {"begin": "<c>", "end": "</c>"} | fields
    return pb.OutputConstraint(tool_calls=pb.ToolCallRules(functions=functions, **rules))


def test_blanks_in_json_are_bounded_whatever_the_schema_says():
    """A client's own options do not reach the compiler."""
    made = json.loads(grammar_text(schema({"type": "object", "x-guidance": {"lenient": True}})))
    options = made["grammars"][0]["json_schema"]["x-guidance"]
    assert options == {"whitespace_pattern": r"\n? {0,16}", "lenient": False}


@pytest.mark.parametrize(
    "constraint",
    [
        pb.OutputConstraint(),
        pb.OutputConstraint(json_schema="{"),
        pb.OutputConstraint(json_schema="[]"),
        pb.OutputConstraint(json_schema="[" * 100_000),
        pb.OutputConstraint(json_schema='{"a": "' + "x" * 300_000 + '"}'),
        schema(nested(100)),
        schema({"properties": {f"p{idx}": {} for idx in range(1001)}}),
        schema({"enum": list(range(30_000))}),
        pb.OutputConstraint(regex="a" * 70_000),
        pb.OutputConstraint(grammar="start: " + "a" * 70_000),
        pb.OutputConstraint(choice=pb.TextChoice()),
        pb.OutputConstraint(choice=pb.TextChoice(texts=["a", ""])),
        pb.OutputConstraint(choice=pb.TextChoice(texts=[str(idx) for idx in range(2000)])),
        calls(),
        calls(pb.CallableFunction(name="f"), begin=""),
        calls(*(pb.CallableFunction(name=f"f{idx}") for idx in range(129))),
        calls(pb.CallableFunction(name="f", arguments_schema='{"type": "string"}')),
        calls(pb.CallableFunction(name="f", grammar="start: " + "a" * 70_000)),
        calls(pb.CallableFunction(name="f", regex="a" * 70_000)),
    ],
)
def test_what_is_malformed_or_too_large_is_refused(constraint):
    """By name and in words of our own."""
    with pytest.raises(InvalidRequest) as caught:
        grammar_text(constraint)
    assert caught.value.param == "constraint"
