"""The bodies of the public API's requests, field by field, with their bounds.

Everything documented stands here; what is honoured and what is refused, `openai_schema` says.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

_UINT32 = 2**32

Positive = Annotated[int, Meta(ge=1, lt=_UINT32)]
Token = Annotated[int, Meta(ge=0, lt=_UINT32)]
Text = Annotated[str, Meta(max_length=512)]
_Name = Annotated[str, Meta(max_length=64)]
# OpenAI's bounds.
Labels = Annotated[dict[_Name, Text], Meta(max_length=16)]
_Stops = Annotated[list[str], Meta(max_length=4)]


# Where agents want a cache to begin, told to whatever server: here all of a prompt is cached.
# Any: each has its own options.
CacheMark = dict[str, Any] | None


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text as part of a message."""

    text: str
    cache_control: CacheMark = None


class RefusalPart(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """A refusal that the model gave earlier."""

    refusal: str


# Parts that no model here reads; their content is not looked at, and never fetched.
class ImagePart(Struct, tag_field="type", tag="image_url"):
    """An image; refused."""


class AudioPart(Struct, tag_field="type", tag="input_audio"):
    """A sound; refused."""


class FilePart(Struct, tag_field="type", tag="file"):
    """A file; refused."""


class FunctionBody(Struct, forbid_unknown_fields=True):
    """The function that a tool call names, its arguments as JSON text."""

    name: str
    arguments: str


class CustomCallBody(Struct, forbid_unknown_fields=True):
    """The custom tool that a call names, and its input."""

    name: str
    input: str


class ToolCallBody(Struct, forbid_unknown_fields=True):
    """A tool call that the model made earlier: of the one kind or the other."""

    id: str
    function: FunctionBody | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None
    custom: CustomCallBody | None = None


class MessageBody(Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart | ImagePart | AudioPart | FilePart] | None = None
    name: Text | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: Text | None = None
    refusal: str | None = None
    # What a model thought earlier; shown to it again where its template does so.
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Sent back by SDKs that echo a whole answer; empty there.
    audio: Any = None
    function_call: Any = None
    annotations: Any = None
    cache_control: CacheMark = None
    # CrewAI's own mark, which it leaves in what it sends through litellm.
    cache_breakpoint: bool | None = None


FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
# The worker's bound.
GrammarText = Annotated[str, Meta(min_length=1, max_length=64 * 1024)]


class FunctionDefinitionBody(Struct, forbid_unknown_fields=True):
    """A function that the model may call. Any: JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionToolBody(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A tool that is a function."""

    function: FunctionDefinitionBody
    cache_control: CacheMark = None


class GrammarBody(Struct, forbid_unknown_fields=True):
    """What an input must match."""

    syntax: Literal["lark", "regex"]
    definition: GrammarText


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Free text."""


class GrammarFormat(Struct, tag_field="type", tag="grammar", forbid_unknown_fields=True):
    """A text that obeys a grammar."""

    grammar: GrammarBody


class CustomDefinitionBody(Struct, forbid_unknown_fields=True):
    """A tool whose input is a text."""

    name: FunctionName
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None


class CustomToolBody(Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    """A tool with free-form input."""

    custom: CustomDefinitionBody
    cache_control: CacheMark = None


class NamedFunction(Struct, forbid_unknown_fields=True):
    """A function by its name."""

    name: str


class FunctionChoice(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """This function must be called."""

    function: NamedFunction


class CustomChoice(Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    """This custom tool must be called."""

    custom: NamedFunction


class AllowedTools(Struct, forbid_unknown_fields=True):
    """A selection of the tools."""

    mode: Literal["auto", "required"]
    tools: list[FunctionChoice | CustomChoice]


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """Only these tools may be called."""

    allowed_tools: AllowedTools


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class JsonSchemaBody(Struct, forbid_unknown_fields=True):
    """A named JSON schema. Any: what is wrong with it is told apart from its shape."""

    name: FunctionName
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that obeys a schema."""

    json_schema: JsonSchemaBody


ResponseFormatBody = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputsBody(Struct, forbid_unknown_fields=True):
    """vLLM's way to say what the answer must be; exactly one field. Any: a JSON schema."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptionsBody(Struct, forbid_unknown_fields=True):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CommonBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both generating endpoints take."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=_UINT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: int | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    n: Annotated[int, Meta(ge=1, le=8)] | None = None
    stop: str | _Stops | None = None
    stop_token_ids: Annotated[list[Token], Meta(max_length=64)] | None = None
    max_tokens: Token | None = None
    min_tokens: Token | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None
    user: Text | None = None
    metadata: Labels | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale", "fast"] | None = None
    # vLLM's number; only 0, the usual place in the queue. Others: see service_tier.
    priority: int | None = None
    store: bool | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    response_format: ResponseFormatBody | None = None
    structured_outputs: StructuredOutputsBody | None = None
    allowed_token_ids: Annotated[list[Token], Meta(min_length=1, max_length=1024)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None


class ChatBody(CommonBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[MessageBody]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[FunctionToolBody | CustomToolBody] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | FunctionChoice
        | CustomChoice
        | AllowedToolsChoice
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    # Not offered: see _REFUSED. Any: whatever JSON the client sent.
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    # Passed by to the model's template, where that knows them.
    reasoning_effort: Text | None = None
    # Models here know no such levels, so every level is the same, as in responses.
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    web_search_options: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    moderation: Any = None


class CompletionBody(CommonBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any] | None = None
    # OpenAI's bound; a chat's top_logprobs go further.
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def bound(self) -> int:
        """The most tokens that are made; 16 where none is named, as OpenAI documents it."""
        return max(16, self.min_tokens or 0) if self.max_tokens is None else self.max_tokens


CHAT_DECODER = msgspec.json.Decoder(ChatBody)
COMPLETION_DECODER = msgspec.json.Decoder(CompletionBody)
