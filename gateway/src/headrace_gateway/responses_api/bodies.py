"""The body of /v1/responses and the items of its input, field by field.

Everything documented stands here; what is honoured and what is refused, `schema` says.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from headrace_gateway.openai_bodies import (
    FunctionName,
    GrammarText,
    Labels,
    Positive,
    Text,
    TextFormat,
)

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    """A text given."""

    text: str


class OutputText(Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """A text that the model made earlier. Any: sent back by clients that echo an answer."""

    text: str
    annotations: Any = None
    logprobs: Any = None


class RefusalContent(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """A refusal that the model gave earlier."""

    refusal: str


# Parts that no model here reads; their content is not looked at, and never fetched.
class InputImage(Struct, tag_field="type", tag="input_image"):
    """An image; refused."""


class InputFile(Struct, tag_field="type", tag="input_file"):
    """A file; refused."""


class InputAudio(Struct, tag_field="type", tag="input_audio"):
    """A sound; refused."""


Content = InputText | OutputText | RefusalContent | InputImage | InputFile | InputAudio


class MessageItem(Struct, tag_field="type", tag="message", forbid_unknown_fields=True):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Content]
    id: Text | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class DirectCaller(Struct, forbid_unknown_fields=True):
    """The model itself called."""

    type: Literal["direct"]


class _CallItem(Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """A call that the model made earlier."""

    call_id: Text
    name: Text
    namespace: Text | None = None
    id: Text | None = None
    status: Status | None = None
    caller: DirectCaller | None = None


class FunctionCallItem(_CallItem, tag="function_call", kw_only=True):
    """A call of a function."""

    arguments: str


class CustomCallItem(_CallItem, tag="custom_tool_call", kw_only=True):
    """A call of a custom tool."""

    input: str


class CallOutputItem(Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """What was said to a call."""

    call_id: Text
    output: str | list[Content]
    id: Text | None = None
    status: Status | None = None
    caller: DirectCaller | None = None
    # Whose result it is, the call says.
    name: Text | None = None


class FunctionCallOutputItem(CallOutputItem, tag="function_call_output", kw_only=True):
    """What a function said."""

    namespace: Text | None = None


class CustomCallOutputItem(CallOutputItem, tag="custom_tool_call_output"):
    """What a custom tool said."""


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier answer; not shown to the model again."""


Item = (
    MessageItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomCallItem
    | CustomCallOutputItem
    | ReasoningItem
)


class FunctionTool(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A function that the model may call. Any: JSON schemas."""

    name: FunctionName
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    # Not offered: refused where they ask for something.
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    output_schema: Any = None


class GrammarFormat(Struct, tag_field="type", tag="grammar", forbid_unknown_fields=True):
    """A text that obeys a grammar."""

    syntax: Literal["lark", "regex"]
    definition: GrammarText


class CustomTool(Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    """A tool whose input is a text."""

    name: FunctionName
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None
    # Not offered: refused where they ask for something.
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None


class Namespace(Struct, tag_field="type", tag="namespace", forbid_unknown_fields=True):
    """Functions under a common name, as agents group those of a server. Any: read one by one."""

    name: FunctionName
    tools: list[Any]
    description: str | None = None


class FunctionChoice(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """This function must be called."""

    name: str


class CustomChoice(Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    """This custom tool must be called."""

    name: str


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """Only these functions may be called."""

    mode: Literal["auto", "required"]
    tools: list[FunctionChoice | CustomChoice]


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that obeys a schema. Any: the schema."""

    name: FunctionName
    schema: Any = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, forbid_unknown_fields=True):
    """What the text must be."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    # Models here know no such levels, so every level is the same.
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """How much to reason: models here do not, so every level is the same."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """How the stream is made."""

    include_obfuscation: bool | None = None


class InputTokensBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses/input_tokens: what a prompt is made of. Any: read item by item."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: Text | None = None
    tools: list[Any] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | FunctionChoice
        | CustomChoice
        | AllowedToolsChoice
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Not offered. Any: whatever JSON the client sent.
    conversation: Any = None


class ResponsesBody(InputTokensBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    metadata: Labels | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale", "fast"] | None = None
    # What Codex says of itself; no part of the prompt. Any: of whatever kind.
    client_metadata: dict[str, Any] | None = None
    # Not offered. Any: whatever JSON the client sent.
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


DECODER = msgspec.json.Decoder(ResponsesBody)
COUNT_DECODER = msgspec.json.Decoder(InputTokensBody)
