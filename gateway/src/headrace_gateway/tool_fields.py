"""tools, tool_choice and parallel_tool_calls of a chat request."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headrace_common.errors import InvalidRequest
from headrace_contracts.guard.v1 import guard_pb2
from headrace_gateway.api_request import ApiRequest, Message, ToolMode, ToolUse
from headrace_gateway.json_body import check_depth
from headrace_gateway.openai_bodies import (
    AllowedToolsChoice,
    ChatBody,
    FunctionChoice,
    FunctionToolBody,
)

_MAX_TOOLS = 128


def add_tools(request: ApiRequest, chat: ChatBody) -> None:
    """Put the tools into the request, seen by the guard.

    Raises:
        InvalidRequest: `param` names what is wrong with them.
    """
    if not chat.tools:
        _refuse_choice_without_tools(chat)
        return
    functions = [_function(tool, f"tools[{idx}]") for idx, tool in enumerate(chat.tools)]
    names = [tool["function"]["name"] for tool in functions]
    if len(functions) > _MAX_TOOLS:
        raise InvalidRequest(f"tools may hold at most {_MAX_TOOLS} functions.", param="tools")
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: each function needs a name of its own.", param="tools")
    mode, allowed = _choice(chat, names)
    # Who names a function wants that call, not several of it.
    is_named = isinstance(chat.tool_choice, FunctionChoice)
    is_parallel = chat.parallel_tool_calls is not False and not is_named
    request.tools = ToolUse(functions, mode, allowed, is_parallel)
    for idx, tool in enumerate(functions):
        _guard_function(request, tool["function"], f"tools[{idx}].function")


def guard_json(request: ApiRequest, value: object, path: str) -> None:
    """Let the guard see every text in a JSON value, joined; it cannot be redacted."""
    if not value:
        return
    request.add_guarded(path, guard_pb2.TRUST_OWNER, json_texts(value), None)


def json_texts(value: object) -> str:
    """Return every text in a JSON value, names of fields too, one a line."""
    return "\n".join(_texts(value))


def _function(tool: msgspec.Struct, path: str) -> Message:
    if not isinstance(tool, FunctionToolBody):
        raise InvalidRequest("Only tools of type function are supported.", param=f"{path}.type")
    given = tool.function
    check_depth(given.parameters, f"{path}.function.parameters")
    function: Message = {"name": given.name}
    if given.description is not None:
        function["description"] = given.description
    function["parameters"] = given.parameters or {"type": "object", "properties": {}}
    if given.strict is not None:
        function["strict"] = given.strict
    return {"type": "function", "function": function}


def _guard_function(request: ApiRequest, function: Message, path: str) -> None:
    request.add_guarded(f"{path}.name", guard_pb2.TRUST_OWNER, function["name"], None)
    description = function.get("description", "")
    slot = (function, "description")
    request.add_guarded(f"{path}.description", guard_pb2.TRUST_OWNER, description, slot)
    guard_json(request, function["parameters"], f"{path}.parameters")


def _refuse_choice_without_tools(chat: ChatBody) -> None:
    # OpenAI refuses both, SDKs that send every field with its default are let pass.
    if chat.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")


def _choice(chat: ChatBody, names: list[str]) -> tuple[ToolMode, frozenset[str]]:
    choice = chat.tool_choice
    if choice is None:
        return ToolMode.AUTO, frozenset()
    if isinstance(choice, str):
        return ToolMode(choice), frozenset()
    if isinstance(choice, FunctionChoice):
        return ToolMode.REQUIRED, _known([choice.function.name], names)
    if isinstance(choice, AllowedToolsChoice):
        allowed = _known([tool.function.name for tool in choice.allowed_tools.tools], names)
        return ToolMode(choice.allowed_tools.mode), allowed
    raise InvalidRequest("Only tools of type function are supported.", param="tool_choice.type")


def _known(chosen: list[str], names: list[str]) -> frozenset[str]:
    for name in chosen:
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names the function {name!r}, which is not in tools.",
                param="tool_choice",
            )
    if not chosen:
        raise InvalidRequest("tool_choice allows no tool at all.", param="tool_choice")
    return frozenset(chosen)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
