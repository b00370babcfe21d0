"""tools, tool_choice and parallel_tool_calls of a chat request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace_common.errors import InvalidRequest
from headrace_contracts.guard.v1 import guard_pb2
from headrace_gateway.api_request import ApiRequest, CustomInput, Message, ToolMode, ToolUse
from headrace_gateway.custom_tools import as_function, input_of
from headrace_gateway.json_body import check_free_form
from headrace_gateway.openai_bodies import (
    AllowedToolsChoice,
    ChatBody,
    CustomChoice,
    CustomToolBody,
    FunctionChoice,
    FunctionToolBody,
)

_MAX_TOOLS = 128


def add_tools(request: ApiRequest, chat: ChatBody, customs: dict[str, CustomInput]) -> None:
    """Put the tools into the request, seen by the guard; *customs* as `custom_inputs` tells them.

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
    mode, allowed = _choice(chat, names, customs)
    # Who names a function wants that call, not several of it.
    is_named = isinstance(chat.tool_choice, FunctionChoice | CustomChoice)
    is_parallel = chat.parallel_tool_calls is not False and not is_named
    request.tools = ToolUse(functions, mode, allowed, is_parallel, customs)
    for idx, tool in enumerate(functions):
        function = tool["function"]
        custom = customs.get(function["name"])
        if custom is None:
            _guard_function(request, function, f"tools[{idx}].function")
        else:
            _guard_custom(request, function, custom, f"tools[{idx}].custom")


def custom_inputs(chat: ChatBody) -> dict[str, CustomInput]:
    """Return what the custom tools of a chat take, by name."""
    tools = chat.tools or ()
    customs = [tool.custom for tool in tools if isinstance(tool, CustomToolBody)]
    return {custom.name: input_of(custom) for custom in customs}


def guard_json(request: ApiRequest, value: object, path: str) -> None:
    """Let the guard see every text in a JSON value, joined; it cannot be redacted."""
    if not value:
        return
    request.add_guarded(path, guard_pb2.TRUST_OWNER, json_texts(value), None)


def json_texts(value: object) -> str:
    """Return every text in a JSON value, names of fields too, one a line."""
    return "\n".join(_texts(value))


def _function(tool: FunctionToolBody | CustomToolBody, path: str) -> Message:
    if isinstance(tool, CustomToolBody):
        return {"type": "function", "function": as_function(tool.custom)}
    given = tool.function
    check_free_form(given.parameters, f"{path}.function.parameters")
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


def _guard_custom(request: ApiRequest, function: Message, custom: CustomInput, path: str) -> None:
    request.add_guarded(f"{path}.name", guard_pb2.TRUST_OWNER, function["name"], None)
    # A grammar is part of the description that the model sees, and cannot be redacted there.
    slot = None if custom.is_bare else (function, "description")
    description = function.get("description", "")
    request.add_guarded(f"{path}.description", guard_pb2.TRUST_OWNER, description, slot)


def _refuse_choice_without_tools(chat: ChatBody) -> None:
    # OpenAI refuses both, SDKs that send every field with its default are let pass.
    if chat.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")


def _choice(
    chat: ChatBody, names: list[str], customs: Mapping[str, CustomInput]
) -> tuple[ToolMode, frozenset[str]]:
    choice = chat.tool_choice
    if choice is None:
        return ToolMode.AUTO, frozenset()
    if isinstance(choice, str):
        return ToolMode(choice), frozenset()
    if isinstance(choice, AllowedToolsChoice):
        if not choice.allowed_tools.tools:
            raise InvalidRequest("tool_choice allows no tool at all.", param="tool_choice")
        allowed = frozenset(_known(it, names, customs) for it in choice.allowed_tools.tools)
        return ToolMode(choice.allowed_tools.mode), allowed
    return ToolMode.REQUIRED, frozenset((_known(choice, names, customs),))


def _known(
    choice: FunctionChoice | CustomChoice, names: list[str], customs: Mapping[str, CustomInput]
) -> str:
    is_custom = isinstance(choice, CustomChoice)
    name = choice.custom.name if isinstance(choice, CustomChoice) else choice.function.name
    if name not in names or is_custom != (name in customs):
        kind = "custom tool" if is_custom else "function"
        raise InvalidRequest(
            f"tool_choice names the {kind} {name!r}, which is not in tools.", param="tool_choice"
        )
    return name


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
