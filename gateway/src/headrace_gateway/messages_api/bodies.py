"""The bodies of /v1/messages, field by field.

Everything documented stands here; what is honoured and what is refused, `schema` says.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from headrace_gateway.openai_bodies import FunctionName, Positive, Text


class CacheControl(Struct, forbid_unknown_fields=True):
    """A mark for caching. Prefixes are cached without one, so it changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    # Claude Code's; no cache is shared between tenants here, whatever it asks for.
    scope: Literal["global"] | None = None


class TextBlock(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text."""

    text: str
    cache_control: CacheControl | None = None
    # Sent back by clients that echo an answer; empty there.
    citations: Any = None


class SystemBlock(Struct, forbid_unknown_fields=True):
    """A text of the operator. A tag would not be asked for where there is but one kind of block."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None


# Blocks that no model here reads; their content is not looked at, and never fetched.
class ImageBlock(Struct, tag_field="type", tag="image"):
    """An image; refused."""


class DocumentBlock(Struct, tag_field="type", tag="document"):
    """A document; refused."""


class SearchResultBlock(Struct, tag_field="type", tag="search_result"):
    """A search result; refused."""


class DirectCaller(Struct, forbid_unknown_fields=True):
    """The model itself called a tool."""

    type: Literal["direct"]


class ToolUseBlock(Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A tool call that the model made earlier. Any: its input, a JSON object."""

    id: Text
    name: Text
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None


class ToolResultBlock(Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    """What a tool said."""

    tool_use_id: Text
    content: str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """Reasoning of an earlier answer; not shown to the model again."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(
    Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True
):
    """Hidden reasoning of an earlier answer; not shown to the model again."""

    data: str


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)


class Turn(Struct, forbid_unknown_fields=True):
    """One message."""

    # system: an instruction in the middle of a conversation.
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolBody(Struct, forbid_unknown_fields=True):
    """A tool. Any: JSON schema of its input."""

    name: FunctionName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    # A stream of arguments is as eager as it can be anyway.
    eager_input_streaming: bool | None = None
    # Not offered: refused where they ask for something. Any: whatever JSON the client sent.
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[Any] | None = None


class AutoChoice(Struct, tag_field="type", tag="auto", forbid_unknown_fields=True):
    """The model may call."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any", forbid_unknown_fields=True):
    """The model must call."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, tag_field="type", tag="tool", forbid_unknown_fields=True):
    """The model must call this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    """The model must not call."""


class Metadata(Struct, forbid_unknown_fields=True):
    """Whom it is for; kept out of prompts."""

    user_id: Text | None = None


class ThinkingDisabled(Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    """No reasoning: what models here do."""


class ThinkingEnabled(Struct, tag_field="type", tag="enabled"):
    """Reasoning with a budget; refused."""


class ThinkingAdaptive(Struct, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    """Reasoning as the model sees fit: models here see no need."""

    display: Literal["summarized", "omitted"] | None = None


class SchemaFormat(Struct, forbid_unknown_fields=True):
    """JSON that obeys a schema. Any: the schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """What the answer must be."""

    format: SchemaFormat | None = None
    # How much to reason: models here do not, so every level is the same.
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    # Any: refused.
    task_budget: Any = None


class ClearThinking(Struct, forbid_unknown_fields=True):
    """Leave earlier reasoning out: always done. Any: how much of it to keep."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(Struct, forbid_unknown_fields=True):
    """What is dropped from the conversation; other edits are refused."""

    edits: list[ClearThinking] | None = None


class CountBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: list[Turn]
    system: str | list[SystemBlock] | None = None
    # Read one by one: those of kinds that are not offered have fields of their own.
    tools: list[Any] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoneChoice | None = None
    thinking: ThinkingDisabled | ThinkingEnabled | ThinkingAdaptive | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    # Not offered. Any: whatever JSON the client sent.
    container: Any = None
    mcp_servers: Any = None
    speed: Any = None
    diagnostics: Any = None
    inference_geo: Any = None


class MessagesBody(CountBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    max_tokens: Positive
    # As many as workers take; Anthropic documents no bound.
    stop_sequences: Annotated[list[str], Meta(max_length=64)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**32)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # A conversation that the server holds; refused. Any: whatever JSON the client sent.
    thread: Any = None


MESSAGES_DECODER = msgspec.json.Decoder(MessagesBody)
COUNT_DECODER = msgspec.json.Decoder(CountBody)
