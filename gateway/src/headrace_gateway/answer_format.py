"""The public shapes of answers: chat and text completion, whole and in chunks. Pure.

A chunk is put together from byte templates made once per request; only the text goes through a
JSON encoder (0.13 us instead of 3 for the whole object). Line separators that are legal in JSON but
cut an event in readers that split on them (U+2028, U+2029, U+0085) are escaped.

Long because both endpoints, whole and in chunks, share what an answer is.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import orjson

from headrace_common.price_rows import cached_tokens
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.worker.v1.worker_pb2 import TokenLogprob
from headrace_gateway.answer_extras import (
    AnswerExtras,
    Json,
    best_by_text,
    more_fields,
    token_text,
)
from headrace_gateway.tool_calls import call_id

_SEPARATORS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


@dataclass(slots=True)
class CallAnswer:
    """One call of a function, its arguments as JSON text, or of a custom tool with its input."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChoiceAnswer:
    """One finished choice."""

    text: str = ""
    finish_reason: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # Of them, those of the prompt, which come first.
    num_echoed: int = 0
    calls: list[CallAnswer] = field(default_factory=list)


@dataclass(slots=True)
class AnswerHead:
    """What every chunk repeats."""

    answer_id: str
    created_unix_s: int
    model: str
    fingerprint: str
    # Said if the client named one.
    service_tier: str | None = None

    def fields(self, kind: str) -> Json:
        """Return them as an object's first fields."""
        fields: Json = {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        if self.service_tier is not None:
            fields["service_tier"] = self.service_tier
        return fields


class AnswerFormat(Protocol):
    """One endpoint's shapes."""

    def opening(self, choice_idx: int) -> bytes:
        """Return the chunk before a choice's first text; may be empty."""
        ...

    def delta(
        self, choice_idx: int, text: str, logprobs: Sequence[TokenLogprob] | None, usage: bytes
    ) -> bytes:
        """Return a chunk with text."""
        ...

    def finish(self, choice_idx: int, reason: str, usage: bytes) -> bytes:
        """Return the chunk that ends a choice."""
        ...

    def usage_chunk(self, usage: TokenUsage) -> bytes:
        """Return the last chunk: no choices, the usage."""
        ...

    def whole(self, choices: Sequence[ChoiceAnswer], usage: TokenUsage) -> bytes:
        """Return the body of an answer that is not streamed."""
        ...


class ToolFormat(Protocol):
    """The shapes of calls, of endpoints that take tools."""

    def call(self, choice_idx: int, call_idx: int, name: str, usage: bytes) -> bytes:
        """Return the chunk that begins a call."""
        ...

    def arguments(self, choice_idx: int, call_idx: int, text: str, usage: bytes) -> bytes:
        """Return a chunk with more of a call's arguments."""
        ...


def encode_text(text: str) -> bytes:
    """Encode a JSON string that survives readers which split lines at Unicode separators."""
    encoded = orjson.dumps(text)
    return encoded if text.isascii() else escape_separators(encoded)


def escape_separators(encoded: bytes) -> bytes:
    """Escape, in JSON, the characters at which some readers split lines."""
    for raw, escaped in _SEPARATORS:
        if raw in encoded:
            encoded = encoded.replace(raw, escaped)
    return encoded


def usage_json(usage: TokenUsage) -> Json:
    """Return the public usage object. Zero is said, never left out."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(usage), "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def event(payload: bytes) -> bytes:
    """Frame one server-sent event."""
    return b"data: " + payload + b"\n\n"


class ChatFormat:
    """Chat completions; *customs* = names of custom tools."""

    def __init__(
        self,
        head: AnswerHead,
        extras: AnswerExtras | None = None,
        customs: Collection[str] = (),
    ) -> None:
        self._head, self._extras = head, extras or AnswerExtras()
        self._customs = customs
        # Choice and call of those that a stream has begun.
        self._custom_calls: set[tuple[int, int]] = set()
        self._is_plain = not (self._extras.shown.logprobs or self._extras.shown.token_ids)

    @cached_property
    def _before(self) -> bytes:
        return _before(self._head, "chat.completion.chunk")

    def opening(self, choice_idx: int) -> bytes:
        """Return the chunk that names the role."""
        return self._chunk(
            choice_idx,
            b'{"role":"assistant","content":"","refusal":null}',
            b"null",
            b"null",
            more_fields(self._extras.of_prompt(0)) if choice_idx == 0 else b"",
        )

    def delta(
        self, choice_idx: int, text: str, logprobs: Sequence[TokenLogprob] | None, usage: bytes
    ) -> bytes:
        """Return a chunk with text."""
        if self._is_plain:
            # Most tokens of most answers: nothing of it changes but the text.
            return (
                b'%s{"index":%d,"delta":{"content":%s},"logprobs":null,"finish_reason":null}]%s}\n\n'
                % (self._before, choice_idx, encode_text(text), usage)
            )
        delta = b'{"content":' + encode_text(text) + b"}"
        more = more_fields(self._extras.of_output(logprobs))
        shown = self._extras.shown_logprobs(logprobs)
        return self._chunk(choice_idx, delta, self._logprobs(shown), b"null" + more, usage)

    def call(self, choice_idx: int, call_idx: int, name: str, usage: bytes) -> bytes:
        """Return the chunk that begins a call: index, id and name."""
        kind, texts = b"function", {"name": name, "arguments": ""}
        if name in self._customs:
            self._custom_calls.add((choice_idx, call_idx))
            kind, texts = b"custom", {"name": name, "input": ""}
        delta = b'{"tool_calls":[{"index":%d,"id":%s,"type":"%s","%s":%s}]}' % (
            call_idx,
            orjson.dumps(call_id(self._head.answer_id, choice_idx, call_idx)),
            kind,
            kind,
            orjson.dumps(texts),
        )
        return self._chunk(choice_idx, delta, b"null", b"null", usage)

    def arguments(self, choice_idx: int, call_idx: int, text: str, usage: bytes) -> bytes:
        """Return a chunk with more of a call's arguments."""
        form = b'{"tool_calls":[{"index":%d,"function":{"arguments":%s}}]}'
        if (choice_idx, call_idx) in self._custom_calls:
            form = b'{"tool_calls":[{"index":%d,"custom":{"input":%s}}]}'
        delta = form % (call_idx, encode_text(text))
        return self._chunk(choice_idx, delta, b"null", b"null", usage)

    def finish(self, choice_idx: int, reason: str, usage: bytes) -> bytes:
        """Return the chunk that ends a choice."""
        return self._chunk(choice_idx, b"{}", b"null", orjson.dumps(reason), usage)

    def usage_chunk(self, usage: TokenUsage) -> bytes:
        """Return the last chunk."""
        return b'%s],"usage":%s}\n\n' % (self._before, orjson.dumps(usage_json(usage)))

    def whole(self, choices: Sequence[ChoiceAnswer], usage: TokenUsage) -> bytes:
        """Return the whole answer."""
        return _whole(
            self._head,
            "chat.completion",
            [
                {
                    "index": idx,
                    "message": self._message(idx, it),
                    "logprobs": self._extras.whole_logprobs(it.logprobs, chat_logprobs),
                    "finish_reason": it.finish_reason,
                    **self._extras.of_output(it.logprobs),
                }
                for idx, it in enumerate(choices)
            ],
            usage,
            self._extras.of_prompt(0),
        )

    def _message(self, choice_idx: int, choice: ChoiceAnswer) -> Json:
        message: Json = {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": [],
        }
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {
                    "id": call_id(self._head.answer_id, choice_idx, call_idx),
                    **self._call(call),
                }
                for call_idx, call in enumerate(choice.calls)
            ]
        return message

    def _call(self, call: CallAnswer) -> Json:
        if call.name in self._customs:
            return {"type": "custom", "custom": {"name": call.name, "input": call.arguments}}
        return {
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _chunk(
        self, choice_idx: int, delta: bytes, logprobs: bytes, reason: bytes, usage: bytes
    ) -> bytes:
        return b'%s{"index":%d,"delta":%s,"logprobs":%s,"finish_reason":%s}]%s}\n\n' % (
            self._before,
            choice_idx,
            delta,
            logprobs,
            reason,
            usage,
        )

    @staticmethod
    def _logprobs(logprobs: Sequence[TokenLogprob] | None) -> bytes:
        return b"null" if not logprobs else orjson.dumps(chat_logprobs(logprobs))


class CompletionFormat:
    """Text completions."""

    def __init__(self, head: AnswerHead, extras: AnswerExtras | None = None) -> None:
        self._head, self._extras = head, extras or AnswerExtras()
        self._places: dict[int, _TextPlace] = {}

    @cached_property
    def _before(self) -> bytes:
        return _before(self._head, "text_completion")

    def opening(self, choice_idx: int) -> bytes:
        """Return nothing: text completions have no opening."""
        return b""

    def delta(
        self, choice_idx: int, text: str, logprobs: Sequence[TokenLogprob] | None, usage: bytes
    ) -> bytes:
        """Return a chunk with text."""
        encoded, is_first = b"null", choice_idx not in self._places
        place = self._places.setdefault(choice_idx, _TextPlace())
        if shown := self._extras.shown_logprobs(logprobs):
            encoded = orjson.dumps(self._logprobs(shown, place))
        # An echo comes first, and is no output.
        of_echo = is_first and self._extras.shown.echo
        more = self._extras.of_output(None if of_echo else logprobs)
        if is_first:
            more = {**self._extras.of_prompt(choice_idx), **more}
        return self._chunk(
            choice_idx, encode_text(text), encoded, b"null" + more_fields(more), usage
        )

    def finish(self, choice_idx: int, reason: str, usage: bytes) -> bytes:
        """Return the chunk that ends a choice."""
        return self._chunk(choice_idx, b'""', b"null", orjson.dumps(reason), usage)

    def usage_chunk(self, usage: TokenUsage) -> bytes:
        """Return the last chunk."""
        return b'%s],"usage":%s}\n\n' % (self._before, orjson.dumps(usage_json(usage)))

    def whole(self, choices: Sequence[ChoiceAnswer], usage: TokenUsage) -> bytes:
        """Return the whole answer."""
        return _whole(
            self._head,
            "text_completion",
            [
                {
                    "index": idx,
                    "text": it.text,
                    "logprobs": self._extras.whole_logprobs(it.logprobs, self._logprobs),
                    "finish_reason": it.finish_reason,
                    **self._extras.of_prompt(idx),
                    **self._extras.of_output(it.logprobs[it.num_echoed :]),
                }
                for idx, it in enumerate(choices)
            ],
            usage,
        )

    def _logprobs(self, logprobs: Sequence[TokenLogprob], place: _TextPlace | None = None) -> Json:
        place = place or _TextPlace()
        begins = place.is_begin
        said = _text_logprobs(logprobs, place)
        if begins and self._extras.shown.echo:
            # Nothing comes before the first token of a prompt.
            said["token_logprobs"][0] = said["top_logprobs"][0] = None
        return said

    def _chunk(
        self, choice_idx: int, text: bytes, logprobs: bytes, reason: bytes, usage: bytes
    ) -> bytes:
        return b'%s{"index":%d,"text":%s,"logprobs":%s,"finish_reason":%s}]%s}\n\n' % (
            self._before,
            choice_idx,
            text,
            logprobs,
            reason,
            usage,
        )


def _before(head: AnswerHead, kind: str) -> bytes:
    """Return what every event of a stream begins with, up to its choices."""
    return b"data: " + orjson.dumps(head.fields(kind))[:-1] + b',"choices":['


def _whole(
    head: AnswerHead, kind: str, choices: list[Json], usage: TokenUsage, more: Json | None = None
) -> bytes:
    return orjson.dumps(
        {**head.fields(kind), "choices": choices, "usage": usage_json(usage), **(more or {})}
    )


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Json:
    """Return log probabilities as a chat answer shows them."""

    def one(token: TokenLogprob) -> Json:
        return {
            "token": token_text(token),
            "logprob": token.logprob,
            "bytes": list(token.token),
        }

    content = [
        {**one(token), "top_logprobs": [one(other) for other in token.top]} for token in logprobs
    ]
    return {"content": content, "refusal": None}


class _TextPlace:
    """Where the tokens of a choice begin in its text, over all its chunks."""

    def __init__(self) -> None:
        self.is_begin = True
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def pass_token(self, token: bytes) -> int:
        """Return the index of the character that *token* begins with, or in."""
        begin = self._num_chars
        self.is_begin = False
        self._num_chars += len(self._decoder.decode(token))
        return begin


def _text_logprobs(logprobs: Sequence[TokenLogprob], place: _TextPlace) -> Json:
    return {
        "tokens": [token_text(token) for token in logprobs],
        "token_logprobs": [token.logprob for token in logprobs],
        "top_logprobs": [best_by_text(token.top) for token in logprobs],
        "text_offset": [place.pass_token(token.token) for token in logprobs],
    }
