"""From a body of /v1/messages to the request that all endpoints share.

It is read as the chat that says the same, so that there is one set of rules; names of fields in
errors are translated back.

::

    system            -> a system message
    tool_use          -> a tool call of the assistant's message
    tool_result       -> a tool message, before the rest of its turn
    thinking          -> left out: earlier reasoning is not shown to the model again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from headrace_common.errors import InvalidRequest
from headrace_gateway.api_request import ApiRequest, Endpoint
from headrace_gateway.json_body import check_free_form, convert, decode
from headrace_gateway.messages_api.bodies import (
    COUNT_DECODER,
    MESSAGES_DECODER,
    AnyChoice,
    CountBody,
    MessagesBody,
    NamedChoice,
    NoneChoice,
    RedactedThinkingBlock,
    SystemBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingEnabled,
    ToolBody,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from headrace_gateway.openai_bodies import (
    ChatBody,
    FunctionBody,
    FunctionChoice,
    FunctionDefinitionBody,
    FunctionToolBody,
    JsonSchemaBody,
    JsonSchemaFormat,
    MessageBody,
    NamedFunction,
    ToolCallBody,
)
from headrace_gateway.openai_schema import read_chat
from headrace_gateway.param_names import TranslatedChat, rename_parts, renaming

# Field -> values that ask for nothing and are let pass.
_REFUSED: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "diagnostics": ({},),
    "inference_geo": (),
}
_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
}


class ThreadUnsupported(InvalidRequest):
    """The server is asked to hold the conversation; clients that know the code send it whole."""

    reason = "THREAD_UNSUPPORTED"
    public_code = "thread_unsupported_request"


def parse_messages(body: bytes) -> ApiRequest:
    """Parse the body of /v1/messages.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    return _read(decode(MESSAGES_DECODER, body))


def parse_count(body: bytes) -> ApiRequest:
    """Parse the body of /v1/messages/count_tokens. The request is only good for encoding.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    return _read(decode(COUNT_DECODER, body))


def _read(asked: CountBody) -> ApiRequest:
    _check(asked)
    chat = TranslatedChat(dict(_NAMES))
    if asked.system:
        chat.add(MessageBody(role="system", content=_joined(asked.system)), "system", content="")
    for idx, turn in enumerate(asked.messages):
        _add_turn(chat, turn, f"messages[{idx}]")
    body = ChatBody(model=asked.model, messages=chat.messages)
    tools = [_tool(given, f"tools[{idx}]") for idx, given in enumerate(asked.tools or ())]
    for idx in range(len(tools)):
        chat.names[f"tools[{idx}].function.parameters"] = f"tools[{idx}].input_schema"
        chat.names[f"tools[{idx}].function"] = f"tools[{idx}]"
    _add_tools(body, tools, asked)
    if asked.output_config is not None and asked.output_config.format is not None:
        schema = JsonSchemaBody(
            name="output", schema=asked.output_config.format.schema, strict=True
        )
        body.response_format = JsonSchemaFormat(json_schema=schema)
    if isinstance(asked, MessagesBody):
        if asked.thread is not None:
            raise ThreadUnsupported("thread is not supported; send all messages.", param="thread")
        _add_sampling(body, asked)
    with renaming(chat.names):
        request = read_chat(body, Endpoint.MESSAGES)
    rename_parts(request, chat.names)
    return request


def _check(asked: CountBody) -> None:
    if not asked.messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    if asked.messages[-1].role == "assistant":
        raise InvalidRequest(
            "The last message must be the user's: an answer cannot be begun for the model here.",
            param=f"messages[{len(asked.messages) - 1}].role",
        )
    for name, neutral in _REFUSED.items():
        value = getattr(asked, name)
        if value is not None and value not in neutral:
            raise _not_supported(name)
    if isinstance(asked.thinking, ThinkingEnabled):
        raise InvalidRequest(
            "This model does not think; leave thinking out or disable it.", param="thinking"
        )
    config = asked.output_config
    if config is not None and config.task_budget is not None:
        raise _not_supported("output_config.task_budget")


def _add_turn(chat: TranslatedChat, turn: Turn, path: str) -> None:
    if isinstance(turn.content, str):
        chat.add(MessageBody(role=turn.role, content=turn.content), path)
        return
    texts: list[str] = []
    calls: list[tuple[ToolCallBody, str]] = []
    for idx, block in enumerate(turn.content):
        where = f"{path}.content[{idx}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolUseBlock) and turn.role == "assistant":
            calls.append((_call(block, where), where))
        elif isinstance(block, ToolResultBlock) and turn.role == "user":
            chat.add(_result(block, where), where, tool_call_id="tool_use_id")
        elif not isinstance(block, ThinkingBlock | RedactedThinkingBlock):
            raise _wrong_block(block, where)
    if texts or calls or turn.role == "assistant":
        chat.add(MessageBody(role=turn.role, content="\n\n".join(texts)), path)
        for call, where in calls:
            chat.add_call(call, where, arguments="input")
    elif not turn.content:
        raise InvalidRequest("content must not be empty.", param=f"{path}.content")


def _wrong_block(block: object, path: str) -> InvalidRequest:
    if isinstance(block, ToolUseBlock):
        return InvalidRequest("Only an assistant uses tools.", param=path)
    if isinstance(block, ToolResultBlock):
        return InvalidRequest("A tool's result is part of a user's message.", param=path)
    kind = type(block).__name__.removesuffix("Block").lower()
    return InvalidRequest(f"This model takes no {kind} blocks, only text.", param=path)


def _call(block: ToolUseBlock, path: str) -> ToolCallBody:
    check_free_form(block.input, f"{path}.input")
    arguments = orjson.dumps(block.input).decode()
    return ToolCallBody(id=block.id, function=FunctionBody(name=block.name, arguments=arguments))


def _result(block: ToolResultBlock, path: str) -> MessageBody:
    content = block.content or ""
    if not isinstance(content, str):
        for idx, part in enumerate(content):
            if not isinstance(part, TextBlock):
                raise _wrong_block(part, f"{path}.content[{idx}]")
        content = _joined([part for part in content if isinstance(part, TextBlock)])
    if block.is_error:
        content = f"Error: {content}"
    return MessageBody(role="tool", content=content, tool_call_id=block.tool_use_id)


def _tool(given: Any, path: str) -> ToolBody:  # Any: JSON of the client
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise InvalidRequest(f"Tools of type {kind[:60]!r} are not offered.", param=f"{path}.type")
    tool: ToolBody = convert(given, ToolBody, path)
    if tool.input_schema is None:
        raise InvalidRequest(
            f"Missing required parameter: {path}.input_schema.", param=f"{path}.input_schema"
        )
    if tool.defer_loading:
        raise _not_supported(f"{path}.defer_loading")
    if tool.allowed_callers not in (None, ["direct"]):
        raise _not_supported(f"{path}.allowed_callers")
    if tool.input_examples:
        raise _not_supported(f"{path}.input_examples")
    return tool


def _add_tools(body: ChatBody, tools: Sequence[ToolBody], asked: CountBody) -> None:
    body.tools = [
        FunctionToolBody(
            function=FunctionDefinitionBody(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            )
        )
        for tool in tools
    ]
    choice = asked.tool_choice
    if isinstance(choice, NoneChoice):
        body.tool_choice = "none"
    elif isinstance(choice, NamedChoice):
        body.tool_choice = FunctionChoice(function=NamedFunction(name=choice.name))
    elif choice is not None:
        body.tool_choice = "required" if isinstance(choice, AnyChoice) else "auto"
    if getattr(choice, "disable_parallel_tool_use", None):
        body.parallel_tool_calls = False


def _add_sampling(body: ChatBody, asked: MessagesBody) -> None:
    body.max_tokens = asked.max_tokens
    body.stop = asked.stop_sequences
    body.stream = asked.stream
    body.user = asked.metadata.user_id if asked.metadata is not None else None
    body.temperature, body.top_p, body.top_k = asked.temperature, asked.top_p, asked.top_k


def _joined(content: str | Sequence[TextBlock | SystemBlock]) -> str:
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content)


def _not_supported(field_name: str) -> InvalidRequest:
    return InvalidRequest(f"{field_name} is not supported.", param=field_name)
