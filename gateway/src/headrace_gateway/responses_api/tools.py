"""The tools of a response: functions and custom tools, namespaces of them, and the server's own.

A function of a namespace is shown to the model as `namespace__function`; its calls, and the tools
that the answer repeats, are told as the client did. Tools that the server would run are refused.
Some of them agents list beside their functions whatever server they talk to: these are passed over
there, and missing where the answer repeats its tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from headrace_common.errors import InvalidRequest
from headrace_gateway import openai_bodies as chat_bodies
from headrace_gateway.answer_extras import Json
from headrace_gateway.json_body import convert
from headrace_gateway.responses_api.bodies import CustomTool, FunctionTool, GrammarFormat, Namespace

_PASSED_OVER = (
    "image_generation",
    # Finds tools that are deferred; none is here.
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
# What the client runs, by type.
_TOOLS: dict[object, type[FunctionTool | CustomTool]] = {
    "function": FunctionTool,
    "custom": CustomTool,
}


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that the model is shown, or a custom tool.

    Args:
        tool: as the client gave it.
        path: what the client calls it in the body.
        namespace: it stands in this one.
        is_first: of its namespace, whose description is told with it.
    """

    tool: FunctionTool | CustomTool
    path: str
    namespace: Namespace | None = None
    is_first: bool = False

    @property
    def shown_name(self) -> str:
        """How the model knows it."""
        return shown_name(self.namespace.name if self.namespace else None, self.tool.name)

    @property
    def is_custom(self) -> bool:
        """Whether its input is a text."""
        return isinstance(self.tool, CustomTool)

    def for_chat(self) -> chat_bodies.FunctionToolBody | chat_bodies.CustomToolBody:
        """Return it as a chat lists it."""
        told = [self.namespace.description if self.namespace and self.is_first else None]
        texts = [text for text in (*told, self.tool.description) if text is not None]
        description = "\n\n".join(texts) if texts else None
        if isinstance(self.tool, CustomTool):
            custom = chat_bodies.CustomDefinitionBody(
                name=self.shown_name, description=description, format=_chat_format(self.tool)
            )
            return chat_bodies.CustomToolBody(custom=custom)
        definition = chat_bodies.FunctionDefinitionBody(
            name=self.shown_name,
            description=description,
            parameters=self.tool.parameters,
            strict=self.tool.strict,
        )
        return chat_bodies.FunctionToolBody(function=definition)


def shown_name(namespace: str | None, name: str) -> str:
    """Return how the model knows a function."""
    return f"{namespace}__{name}" if namespace else name


def called_as(name: str, functions: Iterable[OfferedFunction]) -> Json:
    """Return the fields by which the client knows the function that the model calls *name*."""
    for function in functions:
        if function.namespace is not None and function.shown_name == name:
            return {"name": function.tool.name, "namespace": function.namespace.name}
    return {"name": name}


def read_tools(given: Sequence[Any]) -> list[OfferedFunction]:  # Any: JSON of the client
    """Return the functions that a list of tools offers.

    Raises:
        InvalidRequest: `param` names what is wrong, or not offered.
    """
    functions: list[OfferedFunction] = []
    passed_over: list[InvalidRequest] = []
    for idx, tool in enumerate(given):
        path = f"tools[{idx}]"
        kind = _kind(tool)
        if kind in _TOOLS:
            functions.append(OfferedFunction(_tool(tool, path), path))
        elif kind == "namespace":
            functions += _members(convert(tool, Namespace, path), path)
        elif kind in _PASSED_OVER:
            passed_over.append(_not_offered(kind, path))
        else:
            raise _not_offered(kind, path)
    if passed_over and not functions:
        # Nothing else may be called, so it is what the client wants.
        raise passed_over[0]
    return functions


def echo_tools(functions: Iterable[OfferedFunction]) -> list[Json]:
    """Return the tools as an answer repeats them."""
    tools: list[Json] = []
    for namespace, group in groupby(functions, lambda function: function.namespace):
        members = [_echo(function.tool) for function in group]
        if namespace is None:
            tools += members
        else:
            named = {"type": "namespace", "name": namespace.name}
            tools.append({**named, "description": namespace.description, "tools": members})
    return tools


def _members(namespace: Namespace, path: str) -> Iterator[OfferedFunction]:
    for idx, tool in enumerate(namespace.tools):
        where = f"{path}.tools[{idx}]"
        kind = _kind(tool)
        if kind not in _TOOLS:
            raise _not_offered(kind, where)
        yield OfferedFunction(_tool(tool, where), where, namespace, is_first=idx == 0)


def _tool(given: Any, path: str) -> FunctionTool | CustomTool:  # Any: JSON of the client
    tool: FunctionTool | CustomTool = convert(given, _TOOLS[given["type"]], path)
    for name, wanted in (
        ("defer_loading", tool.defer_loading),
        ("allowed_callers", tool.allowed_callers not in (None, ["direct"])),
        ("output_schema", isinstance(tool, FunctionTool) and tool.output_schema is not None),
    ):
        if wanted:
            raise InvalidRequest(f"{path}.{name} is not supported.", param=f"{path}.{name}")
    return tool


def _chat_format(
    tool: CustomTool,
) -> chat_bodies.TextFormat | chat_bodies.GrammarFormat | None:
    wanted = tool.format
    if not isinstance(wanted, GrammarFormat):
        return wanted
    grammar = chat_bodies.GrammarBody(syntax=wanted.syntax, definition=wanted.definition)
    return chat_bodies.GrammarFormat(grammar=grammar)


def _echo(tool: FunctionTool | CustomTool) -> Json:
    if isinstance(tool, CustomTool):
        wanted = tool.format or chat_bodies.TextFormat()
        named = {"type": "custom", "name": tool.name, "description": tool.description}
        return {**named, "format": msgspec.to_builtins(wanted)}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict is not False,
    }


def _kind(tool: Any) -> str:  # Any: JSON of the client
    return str(tool.get("type") if isinstance(tool, dict) else None)


def _not_offered(kind: str, path: str) -> InvalidRequest:
    return InvalidRequest(
        f"Only functions are offered as tools, not {kind[:60]!r}.", param=f"{path}.type"
    )
