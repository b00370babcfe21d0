"""From a body of /v1/responses to the request that all endpoints share.

It is read as the chat that says the same, so that there is one set of rules; names of fields in
errors are translated back. The items of earlier responses come first, then the new ones;
instructions hold for this response only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace_common.errors import InvalidRequest
from headrace_gateway import openai_bodies as chat_bodies
from headrace_gateway.answer_extras import Json
from headrace_gateway.api_request import ApiRequest, Endpoint
from headrace_gateway.json_body import convert, decode
from headrace_gateway.openai_schema import HINTS, read_chat
from headrace_gateway.param_names import TranslatedChat, rename_parts, renaming
from headrace_gateway.responses_api.bodies import (
    DECODER,
    AllowedToolsChoice,
    CallOutputItem,
    Content,
    CustomCallItem,
    CustomChoice,
    FunctionCallItem,
    FunctionChoice,
    InputText,
    Item,
    JsonObjectFormat,
    JsonSchemaFormat,
    MessageItem,
    OutputText,
    RefusalContent,
    ResponsesBody,
)
from headrace_gateway.responses_api.tools import (
    OfferedFunction,
    echo_tools,
    read_tools,
    shown_name,
)

MAX_ITEMS = 10_000
# What `include` may ask for: a part of the answer, or something that never occurs here.
_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")
# Field -> values that ask for nothing and are let pass.
_REFUSED: dict[str, tuple[object, ...]] = {
    "access_programs": (),
    "background_options": (),
    "context_management": (),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    **HINTS,
}
_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A body, checked as far as it can be without what went before."""

    body: ResponsesBody
    items: list[Json]
    tools: list[OfferedFunction]

    @property
    def previous_id(self) -> str:
        """The response that it goes on from; empty = none."""
        return self.body.previous_response_id or ""

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept."""
        return self.body.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities are part of the answer."""
        return bool(self.body.top_logprobs) or _LOGPROBS in (self.body.include or ())


def parse(body: bytes) -> Asked:
    """Parse a body.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    asked = decode(DECODER, body)
    _check(asked)
    given: list[Any] = (
        [{"role": "user", "content": asked.input}]
        if isinstance(asked.input, str)
        else list(asked.input or ())
    )
    if not given and asked.previous_response_id is None and not asked.instructions:
        raise InvalidRequest("input must hold at least one item.", param="input")
    if len(given) > MAX_ITEMS:
        raise InvalidRequest(f"input may hold at most {MAX_ITEMS} items.", param="input")
    items = [_typed(item, f"input[{idx}]") for idx, item in enumerate(given)]
    for idx, item in enumerate(items):
        convert(item, Item, f"input[{idx}]")
    return Asked(asked, items, read_tools(asked.tools or ()))


def read(asked: Asked, earlier: Sequence[Json]) -> ApiRequest:
    """Return the request that a body makes together with the items of what went before.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    body, chat = asked.body, TranslatedChat(dict(_NAMES))
    if body.instructions:
        message = chat_bodies.MessageBody(role="system", content=body.instructions)
        chat.add(message, "instructions", content="")
    for items, name in ((earlier, "previous_response_id"), (asked.items, "input")):
        for idx, item in enumerate(items):
            _add_item(chat, convert(item, Item, f"{name}[{idx}]"), f"{name}[{idx}]")
    if not chat.messages:
        raise InvalidRequest("input must hold at least one message.", param="input")
    as_chat = _chat_body(asked, chat)
    with renaming(chat.names):
        request = read_chat(as_chat, Endpoint.RESPONSES)
    rename_parts(request, chat.names)
    return request


def _check(asked: ResponsesBody) -> None:
    for name, neutral in _REFUSED.items():
        value = getattr(asked, name)
        if value is not None and value not in neutral:
            raise _not_supported(name)
    for idx, include in enumerate(asked.include or ()):
        if include not in _INCLUDES:
            raise InvalidRequest(f"{include!r} is not offered.", param=f"include[{idx}]")
    if asked.truncation == "auto":
        raise InvalidRequest(
            "truncation must be disabled: nothing is dropped from a conversation here.",
            param="truncation",
        )
    if asked.background and asked.store is False:
        raise InvalidRequest("A background response must be stored.", param="store")
    if asked.stream_options is not None and asked.stream_options.include_obfuscation:
        raise _not_supported("stream_options.include_obfuscation")
    if asked.stream_options is not None and not asked.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")


def _typed(item: Any, path: str) -> Json:  # Any: JSON of the client
    if not isinstance(item, dict):
        raise InvalidRequest(f"Invalid value for {path}: Expected an object.", param=path)
    typed: Json = {"type": "message", **item}
    if typed["type"] == "item_reference":
        raise InvalidRequest(
            "References to items are not supported; send the item, or previous_response_id.",
            param=path,
        )
    return typed


def _add_item(chat: TranslatedChat, item: Item, name: str) -> None:
    if isinstance(item, MessageItem):
        content = _text(item.content, f"{name}.content")
        chat.add(chat_bodies.MessageBody(role=item.role, content=content), name)
    elif isinstance(item, FunctionCallItem):
        called = shown_name(item.namespace, item.name)
        function = chat_bodies.FunctionBody(name=called, arguments=item.arguments)
        _add_call(chat, chat_bodies.ToolCallBody(id=item.call_id, function=function), name)
    elif isinstance(item, CustomCallItem):
        called = shown_name(item.namespace, item.name)
        custom = chat_bodies.CustomCallBody(name=called, input=item.input)
        _add_call(chat, chat_bodies.ToolCallBody(item.call_id, type="custom", custom=custom), name)
    elif isinstance(item, CallOutputItem):
        output = _text(item.output, f"{name}.output")
        message = chat_bodies.MessageBody(role="tool", content=output, tool_call_id=item.call_id)
        chat.add(message, name, content="output", tool_call_id="call_id")


def _add_call(chat: TranslatedChat, call: chat_bodies.ToolCallBody, name: str) -> None:
    """Calls of one answer belong to one message."""
    if not chat.messages or chat.messages[-1].role != "assistant":
        chat.add(chat_bodies.MessageBody(role="assistant"), name)
    fields = {"id": "call_id"}
    if call.type == "custom":
        fields["arguments"] = "input"
    chat.add_call(call, name, **fields)


def _text(content: str | list[Content], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for idx, part in enumerate(content):
        if isinstance(part, InputText | OutputText):
            texts.append(part.text)
        elif isinstance(part, RefusalContent):
            texts.append(part.refusal)
        else:
            kind = type(part).__name__.removeprefix("Input").lower()
            raise InvalidRequest(f"This model takes no {kind}, only text.", param=f"{path}[{idx}]")
    return "".join(texts)


def _chat_body(asked: Asked, chat: TranslatedChat) -> chat_bodies.ChatBody:
    body = asked.body
    made = chat_bodies.ChatBody(
        model=body.model,
        messages=chat.messages,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        prompt_cache_key=body.prompt_cache_key,
        user=body.user,
        safety_identifier=body.safety_identifier,
        metadata=body.metadata,
        service_tier=body.service_tier,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        tool_choice=_choice(body),
    )
    if asked.wants_logprobs:
        made.logprobs, made.top_logprobs = True, body.top_logprobs
    if asked.tools:
        made.tools = [function.for_chat() for function in asked.tools]
        for idx, function in enumerate(asked.tools):
            kind = "custom" if function.is_custom else "function"
            chat.names[f"tools[{idx}].{kind}"] = function.path
    return made


def _format(body: ResponsesBody) -> chat_bodies.ResponseFormatBody | None:
    wanted = body.text.format if body.text is not None else None
    if isinstance(wanted, JsonObjectFormat):
        return chat_bodies.JsonObjectFormat()
    if isinstance(wanted, JsonSchemaFormat):
        schema = chat_bodies.JsonSchemaBody(
            name=wanted.name,
            description=wanted.description,
            schema=wanted.schema,
            strict=wanted.strict,
        )
        return chat_bodies.JsonSchemaFormat(json_schema=schema)
    return None


def _choice(body: ResponsesBody) -> Any:  # Any: one of the chat's kinds of choice
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice | CustomChoice):
        return _named(choice)
    if isinstance(choice, AllowedToolsChoice):
        tools = [_named(tool) for tool in choice.tools]
        allowed = chat_bodies.AllowedTools(mode=choice.mode, tools=tools)
        return chat_bodies.AllowedToolsChoice(allowed_tools=allowed)
    return choice


def _named(
    choice: FunctionChoice | CustomChoice,
) -> chat_bodies.FunctionChoice | chat_bodies.CustomChoice:
    named = chat_bodies.NamedFunction(name=choice.name)
    if isinstance(choice, CustomChoice):
        return chat_bodies.CustomChoice(custom=named)
    return chat_bodies.FunctionChoice(function=named)


def echo(asked: Asked) -> Json:
    """Return the fields of a response that repeat what was asked."""
    body = asked.body
    text: Json = msgspec.to_builtins(body.text) if body.text is not None else {}
    reasoning: Json = msgspec.to_builtins(body.reasoning) if body.reasoning is not None else {}
    return {
        "background": bool(body.background),
        "frequency_penalty": 0,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": 0,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.get("effort"),
            "summary": reasoning.get("summary") or reasoning.get("generate_summary"),
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default" if body.service_tier in (None, "auto") else body.service_tier,
        "store": asked.is_stored,
        # What was not named is the model's, once it is known.
        "temperature": body.temperature,
        "text": {
            "format": text.get("format") or {"type": "text"},
            "verbosity": text.get("verbosity") or "medium",
        },
        "tool_choice": (
            "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice)
        ),
        "tools": echo_tools(asked.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _not_supported(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not supported.", param=name)
