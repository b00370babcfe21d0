"""Every field that the SDKs' request types document is honoured, or refused by its name.

The types are walked down to the last field. An accepted field must make a difference to the request
as it is read, unless `_NOTHING` says why it asks for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai.types.responses
import orjson
import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParams
from openai.types.chat.completion_create_params import CompletionCreateParams as ChatParams
from openai.types.completion_create_params import CompletionCreateParams
from openai.types.responses.response_create_params import ResponseCreateParams

from headrace_common.errors import InvalidRequest
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_gateway.messages_api import sinks as messages
from headrace_gateway.messages_api.schema import parse_count, parse_messages
from headrace_gateway.openai_schema import parse_chat, parse_completion
from headrace_gateway.responses_api import schema as responses
from headrace_gateway.responses_api.sink import fresh_response, usage_json
from headrace_testing.param_types import Example, Examples, fields_of

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"p": {"type": "string"}}}
# Values that any other of the same type would only be refused for.
FIXED = {"schema": SCHEMA, "parameters": SCHEMA, "input_schema": SCHEMA, "call_id": "x"}

# Steps of a path -> values there that ask for nothing, or why nothing there does.
_NOTHING: dict[str, tuple[Any, ...] | str] = {
    "audio": (None,),
    "background": (False,),
    "cache_control": "prefixes are cached without a mark",
    "cache_control.ttl": "prefixes are cached without a mark",
    "cache_control.type": "prefixes are cached without a mark",
    "caller": ({"type": "direct"},),
    "caller.type": ("direct",),
    "citations": "a record of what an earlier answer cited; no model is shown it",
    "defer_loading": (False,),
    "diagnostics": ({},),
    # Of all choices but a named tool, True is found to make a difference.
    "disable_parallel_tool_use": (False, True),
    "eager_input_streaming": "arguments are streamed as they are made anyway",
    "echo": (False,),
    # Of a custom tool.
    "format": ({"type": "text"},),
    "function_call": ("none",),
    "include": ("reasoning.encrypted_content",),
    "include_obfuscation": (False,),
    "include_usage": (False,),
    "is_error": (False,),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": ("text",),
    "output_config": ({},),
    "output_config.effort": "models here do not reason",
    "parallel_tool_calls": (True,),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_options.mode": ("implicit",),
    "prompt_cache_retention": ("in_memory",),
    "reasoning": ({},),
    "reasoning.context": "models here do not reason",
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default", "standard_only"),
    "speed": ("standard",),
    "strict": (False,),
    "store": (True, False),
    "stream_options": ({},),
    "text": ({},),
    "text.format": ({"type": "text"},),
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
    "thinking.display": "models here do not think",
    "tool_choice": ("auto", {"type": "auto"}),
    "allowed_callers": ("direct",),
    "truncation": ("disabled",),
    "type": ("text", "message", "custom", "auto", "disabled", "adaptive"),
    "verbosity": "models here know no such levels",
}


@dataclass(frozen=True)
class Api:
    """An endpoint: its types, how bodies are read, and what surrounds some fields."""

    params: Any
    parse: Callable[[bytes], Any]
    body: dict[str, Any]
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    # What comes before and after the items of a conversation, so that a tool's answer has a call.
    around: dict[str, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)

    def cases(self) -> Iterator[tuple[Example, str, bytes, bytes]]:
        """Yield an example, its path, a body with it and the same body without."""
        for name, kind in fields_of(self.params).items():
            if name == "model":
                continue
            for example in Examples(FIXED | self.fixed).of(kind):
                if example.special is not None:
                    yield example, *self._case(name, example)

    def _case(self, name: str, example: Example) -> tuple[str, bytes, bytes]:
        base = self.body | self.beside.get(name, {})
        without = base if example.plain is None else self._with(base, name, example.plain)
        path = example.under(name, lambda value: value).path
        return path, orjson.dumps(self._with(base, name, example.value)), orjson.dumps(without)

    def _with(self, base: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
        before, after = self.around.get(name, ([], []))
        return {**base, name: [*before, *value, *after] if isinstance(value, list) else value}


def _response(body: bytes) -> Any:
    asked = responses.parse(body)
    return responses.read(asked, []), responses.echo(asked), asked.items


def _beside(tool: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "stream_options": {"stream": True},
        "top_logprobs": {"logprobs": True},
        "tool_choice": {"tools": [tool]},
        "parallel_tool_calls": {"tools": [tool]},
    }


FUNCTION = {"type": "function", "function": {"name": "x", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "x", "parameters": SCHEMA}
CALL = {"id": "x", "type": "function", "function": {"name": "x", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "x", "name": "x", "input": {}}
CLAUDE = {"messages": ([USER, {"role": "assistant", "content": [USE]}], [USER])}
APIS = {
    "chat": Api(
        ChatParams,
        parse_chat,
        {"model": "m", "messages": [USER]},
        _beside(FUNCTION),
        {"messages": ([USER, {"role": "assistant", "tool_calls": [CALL]}], [])},
        {"tools": [{"type": "function", "function": {"name": "x"}}]},
    ),
    "completions": Api(
        CompletionCreateParams,
        parse_completion,
        {"model": "m", "prompt": "hi"},
        {"stream_options": {"stream": True}},
    ),
    "responses": Api(
        ResponseCreateParams,
        _response,
        {"model": "m", "input": "hi"},
        {**_beside(FLAT), "top_logprobs": {}},
        {
            "input": (
                [USER, {"type": "function_call", "call_id": "x", "name": "x", "arguments": "{}"}],
                [],
            )
        },
        {"tools": [{"type": "function", "name": "x"}]},
    ),
    "messages": Api(
        MessageCreateParams,
        parse_messages,
        {"model": "m", "messages": [USER], "max_tokens": 5},
        {"tool_choice": {"tools": [{"name": "x", "input_schema": SCHEMA}]}},
        CLAUDE,
    ),
    "count_tokens": Api(
        MessageCountTokensParams,
        parse_count,
        {"model": "m", "messages": [USER]},
        {"tool_choice": {"tools": [{"name": "x", "input_schema": SCHEMA}]}},
        CLAUDE,
    ),
}


@pytest.mark.parametrize("name", APIS)
def test_no_documented_field_is_passed_over(name: str) -> None:
    """It changes the request, is refused by its name, or asks for nothing for a stated reason."""
    api = APIS[name]
    read = _remembering(api.parse)
    faults: dict[str, str] = {}
    num_honoured = 0
    for example, path, body, without in api.cases():
        outcome = read(body)
        if isinstance(outcome, InvalidRequest):
            if outcome.param is None or not _names(outcome.param, path):
                faults[path] = f"refused as {outcome.param}: {outcome.public_message}"
        elif outcome != read(without):
            num_honoured += 1
        elif not _asks_for_nothing(path, example.special):
            faults[path] = f"passed over: {body[:300]!r}"
    assert not faults, "\n".join(f"{path}: {fault}" for path, fault in faults.items())
    # Else the walk itself is broken.
    assert num_honoured >= 15


def _remembering(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return *parse* that returns refusals and reads the same body once."""
    known: dict[bytes, Any] = {}

    def read(body: bytes) -> Any:
        if body not in known:
            try:
                made = parse(body)
                request = made[0] if isinstance(made, tuple) else made
                known[body] = request.unsupported or made
            except InvalidRequest as error:
                known[body] = error
        return known[body]

    return read


def _names(param: str, path: str) -> bool:
    """Whether a refusal names the field, what it is part of, or a field beside it in that."""
    named, asked = (re.sub(r"\[\d+\]", "", it) + "." for it in (param, path))
    beside = named[:-1].rpartition(".")[0]
    return asked.startswith(named) or named.startswith(asked) or _is_part(asked, beside)


def _is_part(asked: str, parent: str) -> bool:
    return bool(parent) and asked.startswith(f"{parent}.")


def _asks_for_nothing(path: str, special: Any) -> bool:
    steps = re.sub(r"\[\d+\]", "", path).split(".")
    for end in range(len(steps), 0, -1):
        for start in range(end):
            values = _NOTHING.get(".".join(steps[start:end]), ())
            if isinstance(values, str) or (end == len(steps) and special in values):
                return True
    return False


def test_answers_have_every_field_that_the_sdks_know() -> None:
    """Strict readers are told "nothing" where there is nothing, and miss no field."""
    message = messages.message_json("msg_1", "m", [], TokenUsage())
    assert set(anthropic.types.Message.model_fields) <= set(message)
    assert set(anthropic.types.Usage.model_fields) <= set(message["usage"])
    asked = responses.parse(b'{"model":"m","input":"hi"}')
    response = fresh_response("resp_1", "m", 1, responses.echo(asked))
    known = set(openai.types.responses.Response.model_fields)
    assert known - set(response) <= _OF_REFUSED_FEATURES
    assert {"presence_penalty", "frequency_penalty"} <= set(response)
    assert set(openai.types.responses.ResponseUsage.model_fields) <= set(usage_json(TokenUsage()))


_OF_REFUSED_FEATURES = {
    *("access_programs", "context_management", "conversation", "image", "input_transformations"),
    *("moderation", "prompt", "prompt_cache_diagnostics", "prompt_cache_options"),
    *("prompt_cache_retention", "tool_usage"),
}
