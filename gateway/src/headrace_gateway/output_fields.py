"""response_format and structured_outputs: what the whole answer must be."""

from __future__ import annotations

import orjson

from headrace_common.errors import InvalidRequest
from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.worker.v1.worker_pb2 import OutputConstraint, TextChoice
from headrace_gateway.api_request import ApiRequest
from headrace_gateway.json_body import check_free_form
from headrace_gateway.openai_bodies import (
    CommonBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormatBody,
    StructuredOutputsBody,
)
from headrace_gateway.tool_fields import guard_json

_MAX_SCHEMA_CHARS = 256 * 1024
_MAX_CHOICES = 1024


def add_constraint(request: ApiRequest, asked: CommonBody) -> None:
    """Put what the answer must be into the request, seen by the guard.

    Raises:
        InvalidRequest: `param` names what is wrong with it.
    """
    if asked.response_format is None and asked.structured_outputs is None:
        return
    wanted = None if asked.response_format is None else _from_format(request, asked.response_format)
    if asked.structured_outputs is not None:
        if wanted is not None:
            raise InvalidRequest(
                "Give response_format or structured_outputs, not both.", param="structured_outputs"
            )
        wanted = _from_structured(request, asked.structured_outputs)
        request.constraint_path = "structured_outputs"
    request.constraint = wanted


def _from_format(request: ApiRequest, given: ResponseFormatBody) -> OutputConstraint | None:
    if isinstance(given, JsonObjectFormat):
        return OutputConstraint(json_object=True)
    if isinstance(given, JsonSchemaFormat):
        schema = given.json_schema
        if schema.schema is None:
            raise InvalidRequest(
                "Missing required parameter: response_format.json_schema.schema.",
                param="response_format.json_schema.schema",
            )
        if schema.description:
            path = "response_format.json_schema.description"
            request.add_guarded(path, guard_pb2.TRUST_OWNER, schema.description, None)
        made = _schema(request, schema.schema, "response_format.json_schema.schema")
        made.lenient = not schema.strict
        return made
    return None


def _from_structured(request: ApiRequest, given: StructuredOutputsBody) -> OutputConstraint:
    path = "structured_outputs"
    kinds = [name for name in given.__struct_fields__ if getattr(given, name) not in (None, False)]
    if len(kinds) != 1:
        known = ", ".join(given.__struct_fields__)
        raise InvalidRequest(f"{path} must hold exactly one of {known}.", param=path)
    if given.json is not None:
        return _schema(request, _parsed(given.json, f"{path}.json"), f"{path}.json")
    if given.choice is not None:
        if not 0 < len(given.choice) <= _MAX_CHOICES or not all(given.choice):
            raise InvalidRequest(
                f"{path}.choice must hold 1 to {_MAX_CHOICES} texts, none empty.",
                param=f"{path}.choice",
            )
        guard_json(request, given.choice, f"{path}.choice")
        return OutputConstraint(choice=TextChoice(texts=given.choice))
    if given.json_object:
        return OutputConstraint(json_object=True)
    kind = "regex" if given.regex is not None else "grammar"
    text = given.regex or given.grammar or ""
    _check_size(text, f"{path}.{kind}")
    guard_json(request, text, f"{path}.{kind}")
    if kind == "regex":
        return OutputConstraint(regex=text)
    return OutputConstraint(grammar=text)


def _schema(request: ApiRequest, schema: object, path: str) -> OutputConstraint:
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path} must be a JSON schema object.", param=path)
    check_free_form(schema, path)
    text = orjson.dumps(schema).decode()
    _check_size(text, path)
    guard_json(request, schema, path)
    return OutputConstraint(json_schema=text)


def _parsed(schema: object, path: str) -> object:
    if not isinstance(schema, str):
        return schema
    try:
        return orjson.loads(schema)
    except orjson.JSONDecodeError:
        raise InvalidRequest(f"{path} is not valid JSON.", param=path) from None


def _check_size(text: str, path: str) -> None:
    if len(text) > _MAX_SCHEMA_CHARS:
        raise InvalidRequest(f"{path} may have at most {_MAX_SCHEMA_CHARS} characters.", param=path)
