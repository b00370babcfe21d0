"""Tools in prompts: how functions, calls and results are told to a model. Pure.

A template that knows tools in the Hermes spelling (Qwen 2.5 and 3, Hermes, many others) renders
them itself. For any other, functions go into the system message, calls into the assistant's text
and results into a user message, in the same spelling::

    system     ... <tools> one JSON object a line </tools> ...
    assistant  <tool_call> {"name": "f", "arguments": {...}} </tool_call>
    user       <tool_response> result </tool_response>

So answers are read in one way whatever the model (`tool_calls`). A template with a spelling of its
own (Llama 3.1, Mistral) is treated as one without tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# A message or a function as templates see it. Any: strings and JSON values.
Message = dict[str, Any]
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_RESULT_BEGIN, _RESULT_END = "<tool_response>", "</tool_response>"
_INTRODUCTION = (
    "You can call functions to help the user. They are listed between <tools> and </tools>, one "
    "JSON object a line:\n<tools>\n{tools}\n</tools>\n\n"
    "To call a function, write its name and its arguments as one JSON object, like this:\n"
    '<tool_call>\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n</tool_call>\n'
    "The result will be given to you between <tool_response> and </tool_response>. If no function "
    "is needed, answer in plain words."
)


def spells_hermes(template: str) -> bool:
    """Whether a template's source shows tools and their calls in the spelling used here."""
    return all(part in template for part in ("tools", "tool_calls", CALL_BEGIN)) and (
        "<function=" not in template
    )


def tell_tools(messages: Sequence[Message], functions: Sequence[Message]) -> list[Message]:
    """Return the conversation in plain roles and texts, for a template that knows no tools.

    Args:
        messages: the conversation.
        functions: what may be called; empty = nothing is said about functions.
    """
    told: list[Message] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"{_RESULT_BEGIN}\n{message['content']}\n{_RESULT_END}")
            continue
        _end_results(told, results)
        if message.get("tool_calls"):
            told.append({"role": "assistant", "content": _spelled(message)})
        else:
            told.append(message)
    _end_results(told, results)
    return _introduced(told, functions) if functions else told


def _end_results(told: list[Message], results: list[str]) -> None:
    """Results in a row become one user message, as most templates want turns to alternate."""
    if results:
        told.append({"role": "user", "content": "\n".join(results)})
        results.clear()


def _introduced(messages: list[Message], functions: Sequence[Message]) -> list[Message]:
    tools = "\n".join(_json(function) for function in functions)
    text = _INTRODUCTION.format(tools=tools)
    if messages and messages[0]["role"] in ("system", "developer"):
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _spelled(message: Message) -> str:
    calls = [
        f"{CALL_BEGIN}\n{_name_and_arguments(call['function'])}\n{CALL_END}"
        for call in message["tool_calls"]
    ]
    return "\n".join([message["content"], *calls] if message["content"] else calls)


def _name_and_arguments(function: Message) -> str:
    """Arguments that are no JSON stand as they are, as most templates spell them too."""
    arguments = function["arguments"]
    told = arguments if isinstance(arguments, str) else _json(arguments)
    return f'{{"name": {_json(function["name"])}, "arguments": {told}}}'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
