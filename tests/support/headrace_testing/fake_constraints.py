"""What the fake worker says under a constraint: the shortest text it can think of that obeys it.

Kinds that it cannot write itself (a regex, a grammar, a schema) are taken and left to the script
that the test gives; malformed ones are refused as the real worker refuses them.
"""

from __future__ import annotations

import json
import re

from headrace_common.errors import InvalidRequest
from headrace_contracts.worker.v1 import worker_pb2 as pb


def check_constraint(constraint: pb.OutputConstraint) -> None:
    """Refuse what is malformed.

    Raises:
        InvalidRequest: `param` is "constraint".
    """
    kind = constraint.WhichOneof("kind")
    if kind is None and not constraint.HasField("tool_calls"):
        raise _refused("it says nothing")
    if kind == "json_schema":
        _check_schema(constraint.json_schema)
    if kind == "regex":
        try:
            re.compile(constraint.regex)
        except re.error:
            raise _refused("a bad regex") from None
    if kind == "choice" and not all(constraint.choice.texts or [""]):
        raise _refused("no texts")
    for function in constraint.tool_calls.functions:
        _check_schema(function.arguments_schema or "{}")
    if constraint.HasField("tool_calls") and not constraint.tool_calls.functions:
        raise _refused("no functions")


def obeying(constraint: pb.OutputConstraint) -> bytes | None:
    """Return a text that obeys; None = the script's text must do."""
    rules = constraint.tool_calls
    if rules.required and rules.functions[0].WhichOneof("text"):
        function = rules.functions[0]
        if not re.fullmatch(function.regex, function.regex):
            return None
        head = f'{{"name": {json.dumps(function.name)}, "arguments": '
        return f"{rules.begin}\n{head}{function.regex}".encode()
    if rules.required:
        call = json.dumps({"name": rules.functions[0].name, "arguments": {}})
        return f"{rules.begin}\n{call}\n{rules.end}".encode()
    kind = constraint.WhichOneof("kind")
    if kind == "choice":
        return constraint.choice.texts[0].encode()
    return b"{}" if kind == "json_object" else None


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except ValueError:
        raise _refused("a schema that is not JSON") from None
    if not isinstance(schema, dict) or schema.get("type", "object") == "zap":
        raise _refused("a schema that is none")


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"The constraint cannot be used: {why}.", param="constraint")
