"""The requests of the public API, strictly: every documented field is honoured or refused by name.

Fields that no model here can honour yet (`audio`, `prediction`, ...) give a 400 that names them,
never silence. What would reach a model in them goes to the guard first.

Long because every field has its own rule.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

import orjson

from headrace_common.errors import InvalidRequest
from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.worker.v1.worker_pb2 import LogprobOptions, Sampling
from headrace_gateway.api_request import (
    ApiRequest,
    Endpoint,
    Limits,
    Message,
    Prompt,
    ServiceTier,
    Shown,
    StreamOptions,
    labels_of,
)
from headrace_gateway.custom_tools import as_arguments
from headrace_gateway.guard_parts import TRUST_BY_ROLE
from headrace_gateway.json_body import check_free_form, decode
from headrace_gateway.openai_bodies import (
    CHAT_DECODER,
    COMPLETION_DECODER,
    AudioPart,
    ChatBody,
    CommonBody,
    CompletionBody,
    CustomCallBody,
    FilePart,
    ImagePart,
    MessageBody,
    RefusalPart,
    TextPart,
    ToolCallBody,
)
from headrace_gateway.output_fields import add_constraint
from headrace_gateway.sampling_defaults import LEAST_TOP_P, NamedSampling
from headrace_gateway.tool_fields import add_tools, custom_inputs, guard_json

_UINT32 = 2**32
_MAX_CHOICES = 128

# How long and by which rule prefixes are cached: the values that say what is done here anyway.
HINTS: dict[str, tuple[object, ...]] = {
    "prompt_cache_retention": ("in_memory",),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
}
# Field -> values that ask for nothing and are let pass.
_REFUSED: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    **HINTS,
    "moderation": (),
}
# All of them at once: most requests have none.
_all_refused = operator.attrgetter(*_REFUSED)
_NONE_REFUSED = (None,) * len(_REFUSED)
_named_sampling = operator.attrgetter(*NamedSampling._fields)


def parse_chat(body: bytes) -> ApiRequest:
    """Parse the body of /v1/chat/completions.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    return read_chat(decode(CHAT_DECODER, body))


def read_chat(chat: ChatBody, endpoint: Endpoint = Endpoint.CHAT) -> ApiRequest:
    """Read a conversation, whichever endpoint it came by.

    Raises:
        InvalidRequest: `param` names the field at fault, by its name in a chat request.
    """
    if not chat.messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if chat.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
    request = _common(chat, endpoint, chat.max_completion_tokens or chat.max_tokens)
    _add_logprobs(request, chat, (chat.top_logprobs or 0) if chat.logprobs else None)
    request.template_args = _template_args(chat)
    customs = custom_inputs(chat) if chat.tools else {}
    _add_messages(request, chat.messages, {it for it in customs if customs[it].is_bare})
    add_tools(request, chat, customs)
    add_constraint(request, chat)
    if request.template_args:
        guard_json(request, request.template_args, "chat_template_kwargs")
    if _all_refused(chat) != _NONE_REFUSED:
        _guard_refused(request, chat)
        request.unsupported = _refusal(chat)
    return request


def parse_completion(body: bytes) -> ApiRequest:
    """Parse the body of /v1/completions.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    asked = decode(COMPLETION_DECODER, body)
    if asked.suffix:
        raise _not_supported("suffix")
    request = _common(asked, Endpoint.COMPLETIONS, asked.bound)
    _add_logprobs(request, asked, asked.logprobs)
    _add_echo(request, asked)
    _add_best_of(request, asked)
    request.prompts = read_prompts(asked.prompt, "prompt")
    if len(request.prompts) * request.n > _MAX_CHOICES:
        raise InvalidRequest(
            f"Prompts times n may be at most {_MAX_CHOICES} choices.", param="prompt"
        )
    add_constraint(request, asked)
    for idx, prompt in enumerate(request.prompts):
        if isinstance(prompt, str):
            slot = (request.prompts, idx)
            request.add_guarded(f"prompt[{idx}]", guard_pb2.TRUST_USER, prompt, slot)
    return request


def _common(asked: CommonBody, endpoint: Endpoint, max_tokens: int | None) -> ApiRequest:
    if asked.store:
        raise _not_supported("store")
    if asked.priority:
        raise InvalidRequest(
            "priority other than 0 is not supported; use service_tier.", param="priority"
        )
    limits = Limits(
        max_tokens=max_tokens,
        min_tokens=asked.min_tokens or 0,
        stop=_stops(asked.stop),
        stop_token_ids=asked.stop_token_ids or (),
        ignore_eos=bool(asked.ignore_eos),
    )
    if asked.seed is not None and not -(2**63) <= asked.seed < 2**64:
        raise InvalidRequest("seed must fit in 64 bits.", param="seed")
    if max_tokens is not None and limits.min_tokens > max_tokens:
        raise InvalidRequest("min_tokens may not be above max_tokens.", param="min_tokens")
    tier = _tier(asked.service_tier)
    return ApiRequest(
        endpoint=endpoint,
        model=asked.model,
        sampling=_sampling(asked),
        named_sampling=NamedSampling(*_named_sampling(asked)),
        limits=limits,
        streaming=_streaming(asked),
        n=asked.n or 1,
        seed=None if asked.seed is None else asked.seed % 2**64,
        session_id=asked.prompt_cache_key or "",
        shown=Shown(tier=None if asked.service_tier is None else tier),
        service_tier=tier,
        labels=labels_of(asked.user, asked.safety_identifier, asked.metadata),
    )


def _sampling(asked: CommonBody) -> Sampling:
    top_p = asked.top_p if asked.top_p != 0 else LEAST_TOP_P
    sampling = Sampling(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if top_p is None else top_p,
    )
    # What is not asked for is left at the message's own 0: each field named costs.
    if asked.top_k is not None:
        sampling.top_k = max(0, asked.top_k)
    if asked.min_p:
        sampling.min_p = asked.min_p
    if asked.frequency_penalty:
        sampling.frequency_penalty = asked.frequency_penalty
    if asked.presence_penalty:
        sampling.presence_penalty = asked.presence_penalty
    if asked.repetition_penalty:
        sampling.repetition_penalty = asked.repetition_penalty
    if asked.logit_bias:
        sampling.logit_bias.update(_biases(asked.logit_bias))
    if asked.allowed_token_ids:
        sampling.allowed_token_ids.extend(asked.allowed_token_ids)
    return sampling


def _tier(asked: str | None) -> ServiceTier:
    if asked in ("scale", "fast"):
        raise InvalidRequest(
            "service_tier may be auto, default, flex or priority.", param="service_tier"
        )
    return ServiceTier.DEFAULT if asked in (None, "auto") else ServiceTier(asked)


def _add_logprobs(request: ApiRequest, asked: CommonBody, top: int | None) -> None:
    """Ask for log probabilities: for themselves, or since they carry what else is wanted."""
    shown, of_prompt = request.shown, asked.prompt_logprobs
    if top is None and of_prompt is None and not asked.return_token_ids:
        return
    shown.logprobs, shown.token_ids = top is not None, bool(asked.return_token_ids)
    shown.prompt_logprobs = of_prompt is not None
    if of_prompt is not None and request.streaming.is_stream:
        raise InvalidRequest(
            "prompt_logprobs are given in whole answers only.", param="prompt_logprobs"
        )
    request.logprobs = LogprobOptions(
        output=shown.logprobs or shown.token_ids,
        top=max(top or 0, of_prompt or 0),
        prompt=shown.prompt_logprobs,
    )


def _add_echo(request: ApiRequest, asked: CompletionBody) -> None:
    shown = request.shown
    shown.echo = bool(asked.echo)
    if asked.max_tokens == 0:
        if not asked.echo:
            raise InvalidRequest("max_tokens must be at least 1, or echo true.", param="max_tokens")
        # A model's step gives a token; it is computed, and left out.
        shown.is_echo_only, request.limits.max_tokens = True, 1
    if asked.echo and request.logprobs is not None and shown.logprobs:
        request.logprobs.prompt = True


def _add_best_of(request: ApiRequest, asked: CompletionBody) -> None:
    if asked.best_of is None or asked.best_of == request.n:
        return
    if asked.best_of < request.n:
        raise InvalidRequest("best_of must be at least n.", param="best_of")
    if request.streaming.is_stream:
        raise InvalidRequest("best_of above n cannot be streamed.", param="best_of")
    request.shown.num_best, request.n = request.n, asked.best_of
    request.logprobs = request.logprobs or LogprobOptions()
    request.logprobs.output = True


def _template_args(chat: ChatBody) -> dict[str, Any]:
    if chat.chat_template_kwargs is None and chat.reasoning_effort is None:
        return {}
    given = dict(chat.chat_template_kwargs or {})
    if given:
        check_free_form(given, "chat_template_kwargs")
    if chat.reasoning_effort is not None:
        given["reasoning_effort"] = chat.reasoning_effort
    return given


def _biases(given: dict[str, float]) -> dict[int, float]:
    if len(given) > 1024:
        raise InvalidRequest("logit_bias may hold at most 1024 tokens.", param="logit_bias")
    if not all(_is_id_text(key) for key in given):
        raise InvalidRequest("logit_bias: the keys must be token ids.", param="logit_bias")
    return {int(key): bias for key, bias in given.items() if math.isfinite(bias)}


def _is_id_text(text: str) -> bool:
    # The length first: Python refuses to read thousands of digits.
    return text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) < _UINT32


def _stops(stop: str | list[str] | None) -> Sequence[str]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not all(0 < len(text) <= 1024 for text in stops):
        raise InvalidRequest("Texts in stop must have 1 to 1024 characters.", param="stop")
    return stops


def _streaming(asked: CommonBody) -> StreamOptions:
    options = asked.stream_options
    if not asked.stream:
        if options is not None and (options.include_usage or options.continuous_usage_stats):
            raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
        return StreamOptions()
    if options is None:
        return StreamOptions(is_stream=True)
    if options.include_obfuscation:
        raise _not_supported("stream_options.include_obfuscation")
    continuous = bool(options.continuous_usage_stats)
    return StreamOptions(True, bool(options.include_usage) or continuous, continuous)


def _add_messages(request: ApiRequest, given: Sequence[MessageBody], bare: Collection[str]) -> None:
    """*bare* = tools whose input a model writes as it is."""
    called: set[str] = set()
    for idx, message in enumerate(given):
        path = f"messages[{idx}]"
        _add_message(request, message, path)
        if message.tool_calls:
            _add_calls(request, message.tool_calls, path, bare)
        if message.tool_calls:
            called.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in called:
            raise InvalidRequest(
                "A tool message must answer a call of an earlier assistant message.",
                param=f"{path}.tool_call_id",
            )


def _add_message(request: ApiRequest, given: MessageBody, path: str) -> None:
    if given.audio or given.function_call or given.annotations:
        fields = ("audio", "function_call", "annotations")
        raise _not_supported(f"{path}.{next(it for it in fields if getattr(given, it))}")
    trust = TRUST_BY_ROLE[given.role]
    message: Message = {"role": given.role, "content": _content(given, path)}
    request.add_guarded(f"{path}.content", trust, message["content"], (message, "content"))
    if given.name:
        message["name"] = given.name
        request.add_guarded(f"{path}.name", trust, given.name, (message, "name"))
    if given.tool_call_id:
        message["tool_call_id"] = given.tool_call_id
        slot = (message, "tool_call_id")
        request.add_guarded(f"{path}.tool_call_id", trust, given.tool_call_id, slot)
    if reasoning := given.reasoning_content or given.reasoning:
        message["reasoning_content"] = reasoning
        slot = (message, "reasoning_content")
        request.add_guarded(f"{path}.reasoning_content", trust, reasoning, slot)
    request.messages.append(message)


def _add_calls(
    request: ApiRequest, calls: Sequence[ToolCallBody], path: str, bare: Collection[str]
) -> None:
    """Add calls to the last message."""
    message = request.messages[-1]
    trust = TRUST_BY_ROLE[message["role"]]
    message["tool_calls"] = entries = []
    for idx, call in enumerate(calls):
        where = f"{path}.tool_calls[{idx}]"
        texts, entry = _template_call(call, where, bare)
        entries.append(entry)
        request.add_guarded(f"{where}.id", trust, call.id, (entry, "id"))
        for (name, text), key in zip(texts.items(), ("name", "arguments"), strict=True):
            slot = (entry["function"], key)
            request.add_guarded(f"{where}.{call.type}.{name}", trust, text, slot)


def _content(given: MessageBody, path: str) -> str:
    if given.tool_calls and given.role != "assistant":
        raise InvalidRequest("Only an assistant calls tools.", param=f"{path}.tool_calls")
    if given.role == "tool" and not given.tool_call_id:
        raise InvalidRequest("A tool message needs its tool_call_id.", param=f"{path}.tool_call_id")
    if given.content is None:
        if given.role == "assistant" and (given.tool_calls or given.refusal):
            return given.refusal or ""
        raise InvalidRequest("content is missing.", param=f"{path}.content")
    if isinstance(given.content, str):
        return given.content
    return "".join(_part_text(part, f"{path}.content") for part in given.content)


def _part_text(part: TextPart | RefusalPart | ImagePart | AudioPart | FilePart, path: str) -> str:
    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, RefusalPart):
        return part.refusal
    kind = {ImagePart: "images", AudioPart: "audio", FilePart: "files"}[type(part)]
    raise InvalidRequest(f"This model takes no {kind}, only text.", param=path)


def _template_call(
    call: ToolCallBody, path: str, bare: Collection[str]
) -> tuple[dict[str, str], Message]:
    """Return the texts of a call, and it as templates expect it: arguments as JSON if they are."""
    given = call.custom if call.type == "custom" else call.function
    other = call.function if call.type == "custom" else call.custom
    if given is None or other is not None:
        raise InvalidRequest(
            f"A call of type {call.type} holds {call.type} and no other.",
            param=f"{path}.{call.type}",
        )
    arguments: object
    if isinstance(given, CustomCallBody):
        texts = {"name": given.name, "input": given.input}
        arguments = as_arguments(given.input, is_bare=given.name in bare)
    else:
        texts = {"name": given.name, "arguments": given.arguments}
        arguments = _parsed_arguments(given.arguments)
    function = {"name": given.name, "arguments": arguments}
    return texts, {"id": call.id, "type": "function", "function": function}


def _parsed_arguments(text: str) -> object:
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if not isinstance(parsed, dict):
        return text
    check_free_form(parsed, "messages")
    return parsed


def _guard_refused(request: ApiRequest, chat: ChatBody) -> None:
    for field in ("functions", "prediction"):
        value = getattr(chat, field)
        if value:
            check_free_form(value, field)
            guard_json(request, value, field)


def _refusal(chat: ChatBody) -> InvalidRequest | None:
    for field, neutral in _REFUSED.items():
        value = getattr(chat, field)
        if value is not None and value not in neutral:
            return _not_supported(field)
    return None


def read_prompts(prompt: str | list[Any] | None, field: str) -> list[Prompt]:
    """Read one or more texts or lists of token ids.

    Raises:
        InvalidRequest: they are something else, or nothing.
    """
    wrong = InvalidRequest(
        f"{field} must be a text, a list of texts, a list of token ids or of such lists; "
        "not empty.",
        param=field,
    )
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise wrong
    if _is_ids(prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt) or all(_is_ids(item) for item in prompt):
        return list(prompt)
    raise wrong


def _is_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and 0 <= item < _UINT32 for item in value)
    )


def _not_supported(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is not supported yet.", param=field)
