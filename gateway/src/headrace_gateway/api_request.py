"""What the public API asks for, after parsing and before any model is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headrace_common.errors import InvalidRequest
from headrace_contracts.guard.v1.guard_pb2 import Trust
from headrace_contracts.worker.v1.worker_pb2 import LogprobOptions, OutputConstraint, Sampling
from headrace_gateway.sampling_defaults import NOTHING_NAMED, NamedSampling

# A chat message as templates see it. Any: strings, and JSON values inside tool calls.
Message = dict[str, Any]
# A prompt of /v1/completions: text or token ids.
Prompt = str | Sequence[int]
# A container and the key or index in it.
Slot = tuple[Any, Any]  # Any: dict with str, or list with int


class Endpoint(StrEnum):
    """The endpoints that use a model; also a label value."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    BATCHES = "batches"
    UPLOADS = "uploads"
    MODERATIONS = "moderations"
    TOKENIZE = "tokenize"

    @property
    def is_conversation(self) -> bool:
        """Whether it takes messages; else prompts."""
        return self in _CONVERSATIONS

    @property
    def prompt_field(self) -> str:
        """The public name of what the prompt is made of."""
        return _PROMPT_FIELDS.get(self, "input")

    @property
    def limit_field(self) -> str:
        """The public name of the most output tokens."""
        return "max_output_tokens" if self is Endpoint.RESPONSES else "max_tokens"


# An enum's members are dear to look up by their class.
_CONVERSATIONS = (Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES)
_PROMPT_FIELDS = {
    Endpoint.CHAT: "messages",
    Endpoint.MESSAGES: "messages",
    Endpoint.COMPLETIONS: "prompt",
}


@dataclass(slots=True)
class Limits:
    """When to stop. `max_tokens` None = the gateway chooses."""

    max_tokens: int | None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


@dataclass(slots=True)
class StreamOptions:
    """How the answer is sent."""

    is_stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


class ToolMode(StrEnum):
    """Whether the model may, must or must not call a function."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class CustomInput:
    """What the input of a custom tool must be: at most one is given, none = any text."""

    grammar: str = ""
    regex: str = ""

    @property
    def is_bare(self) -> bool:
        """Whether a model writes it as it is, not as a string of JSON; it ends the answer then."""
        return bool(self.grammar or self.regex)


@dataclass(slots=True)
class ToolUse:
    """The functions of a request and how they may be called.

    Args:
        functions: as templates see them: {"type": "function", "function": {"name", "description",
            "parameters" (a JSON schema), "strict"}}; at least one, names unique.
        mode: whether to call.
        allowed: names that may be called; empty = all.
        is_parallel: whether one answer may hold several calls.
        customs: those of the functions that the client knows as custom tools, by name.
    """

    functions: list[Message]
    mode: ToolMode = ToolMode.AUTO
    allowed: frozenset[str] = frozenset()
    is_parallel: bool = True
    customs: dict[str, CustomInput] = field(default_factory=dict)

    @property
    def is_offered(self) -> bool:
        """Whether the model is shown the functions at all."""
        return self.mode is not ToolMode.NONE

    def callable_functions(self) -> list[Message]:
        """Return the inner objects of the functions that may be called."""
        return [
            tool["function"]
            for tool in self.functions
            if not self.allowed or tool["function"]["name"] in self.allowed
        ]


class ServiceTier(StrEnum):
    """How urgently a request is served, and at which price."""

    DEFAULT = "default"
    FLEX = "flex"
    PRIORITY = "priority"


@dataclass(slots=True)
class Shown:
    """What the answer holds beside the text.

    Args:
        logprobs: log probabilities of the output, as the worker was asked for.
        token_ids: the ids of prompt and output.
        prompt_logprobs: log probabilities of the prompt.
        echo: the prompt, before each choice's text.
        is_echo_only: nothing but the prompt; the one token that is computed is left out.
        num_best: choices to keep of each prompt's, the likeliest first; 0 = all.
        tier: the class of service, if the client named one.
    """

    logprobs: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False
    echo: bool = False
    is_echo_only: bool = False
    num_best: int = 0
    tier: ServiceTier | None = None


@dataclass(slots=True)
class GuardPart:
    """A text that the guard must see, where it stands in the request, and whose it is."""

    path: str
    trust: Trust.ValueType
    text: str


@dataclass(slots=True)
class ApiRequest:
    """One parsed request: all that the guard judges, and all that a prompt is made of.

    Every public endpoint parses into this. Messages are dictionaries as templates see them:
    `role` (system, developer, user, assistant, tool), `content` (a string, "" for none), and where
    given `name`, `tool_calls` ([{"id", "type": "function", "function": {"name", "arguments"}}], the
    arguments an object if they are JSON, else the text) and `tool_call_id`.
    """

    endpoint: Endpoint
    model: str
    # OpenAI's defaults where the client named nothing; `named_sampling` tells what it named.
    sampling: Sampling
    limits: Limits
    streaming: StreamOptions
    # Chat: the conversation. Completions: empty.
    messages: list[Message] = field(default_factory=list)
    # None = none were given.
    tools: ToolUse | None = None
    # What the whole text must be; the calls in it are added for the model. None = anything.
    constraint: OutputConstraint | None = None
    # The public field that it came from.
    constraint_path: str = "response_format"
    # Completions: one or more. Chat: empty.
    prompts: list[Prompt] = field(default_factory=list)
    # Everything that the guard must see, texts only; prompts of ids are added once decoded.
    guard_parts: list[GuardPart] = field(default_factory=list)
    # Where each guarded text stands, to put a redacted one there.
    guard_slots: list[Slot | None] = field(default_factory=list)
    # Where parts stand that nothing can read (images, audio): never judged as clean.
    opaque_paths: list[str] = field(default_factory=list)
    named_sampling: NamedSampling = NOTHING_NAMED
    n: int = 1
    # None = drawn at admission.
    seed: int | None = None
    logprobs: LogprobOptions | None = None
    session_id: str = ""
    shown: Shown = field(default_factory=Shown)
    service_tier: ServiceTier = ServiceTier.DEFAULT
    # Given to the chat template beside the conversation. Any: JSON values.
    template_args: dict[str, Any] = field(default_factory=dict)
    # What the client calls it by (user, metadata), for its story; no model sees that.
    labels: dict[str, Any] = field(default_factory=dict)
    # A feature that is not offered yet, told only after the guard has seen the input.
    unsupported: InvalidRequest | None = None

    def add_guarded(self, path: str, trust: Trust.ValueType, text: str, slot: Slot | None) -> None:
        """Note a text that the guard must see."""
        if text:
            self.guard_parts.append(GuardPart(path, trust, text))
            self.guard_slots.append(slot)

    def redact(self, texts: Mapping[int, str]) -> None:
        """Put the guard's new texts in the places of the parts they replace.

        Raises:
            InvalidRequest: a part cannot be replaced.
        """
        for part_idx, text in texts.items():
            slot = self.guard_slots[part_idx]
            if slot is None:
                path = self.guard_parts[part_idx].path
                raise InvalidRequest("This part must be redacted and cannot be.", param=path)
            container, key = slot
            container[key] = text


def labels_of(
    user: str | None, safety_identifier: str | None = None, metadata: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return what the client calls a request by, as its story tells it."""
    if user is None and safety_identifier is None and not metadata:
        return {}
    given = {"user": user, "safety_identifier": safety_identifier, "metadata": metadata}
    return {name: value for name, value in given.items() if value}
