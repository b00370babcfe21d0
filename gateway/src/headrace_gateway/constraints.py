"""What a worker must hold an answer to, and its refusals in the client's own words."""

from __future__ import annotations

import orjson

from headrace_common.errors import InvalidRequest
from headrace_contracts.worker.v1.worker_pb2 import (
    CallableFunction,
    OutputConstraint,
    ToolCallRules,
)
from headrace_gateway.api_request import ApiRequest, CustomInput, Message, ToolMode
from headrace_gateway.tool_prompt import CALL_BEGIN, CALL_END


class InvalidSchema(InvalidRequest):
    """The wanted form of the answer cannot be enforced."""

    reason = "INVALID_SCHEMA"
    public_code = "invalid_json_schema"


class InvalidFunction(InvalidRequest):
    """A function's parameters cannot be enforced."""

    reason = "INVALID_FUNCTION"
    public_code = "invalid_function_parameters"


# Of one answer: small models repeat a call until their tokens are spent.
_MAX_CALLS = 16


def output_constraint(request: ApiRequest) -> OutputConstraint | None:
    """Return what a worker must hold the answer to; None = nothing."""
    tools = request.tools
    if tools is None or not tools.is_offered:
        return request.constraint
    whole = OutputConstraint()
    if request.constraint is not None:
        whole.CopyFrom(request.constraint)
    whole.tool_calls.CopyFrom(
        ToolCallRules(
            functions=[
                _callable(function, tools.customs.get(function["name"]))
                for function in tools.callable_functions()
            ],
            required=tools.mode is ToolMode.REQUIRED,
            max_calls=_MAX_CALLS if tools.is_parallel else 1,
            begin=CALL_BEGIN,
            end=CALL_END,
        )
    )
    return whole


def _callable(function: Message, custom: CustomInput | None) -> CallableFunction:
    if custom is not None and custom.grammar:
        return CallableFunction(name=function["name"], grammar=custom.grammar)
    if custom is not None and custom.regex:
        return CallableFunction(name=function["name"], regex=custom.regex)
    return CallableFunction(
        name=function["name"],
        arguments_schema=orjson.dumps(function["parameters"]).decode(),
        lenient=not function.get("strict"),
    )


def for_client(error: InvalidRequest, request: ApiRequest) -> InvalidRequest:
    """Return a worker's refusal with the name and code that the client knows.

    A worker judges the constraint as one; with both a format and tools the format is named.
    """
    if error.param != "constraint":
        return error
    if request.constraint is not None:
        return InvalidSchema(error.public_message, param=request.constraint_path)
    return InvalidFunction(error.public_message, param="tools")
