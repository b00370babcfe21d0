"""The shapes of an answer of /v1/messages: whole, and as the sequence of events of a stream.

::

    message_start
      (content_block_start content_block_delta* content_block_stop)*
    message_delta message_stop                    ping: after the first block has begun, and in
                                                  every silence
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace_common.clock import Clock
from headrace_common.price_rows import cached_tokens
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.worker.v1.worker_pb2 import TokenLogprob
from headrace_gateway.answer_extras import Json
from headrace_gateway.event_stream import EventStream, named_event
from headrace_gateway.tool_calls import call_id
from headrace_gateway.visit import Exchange

# What is told of usage once more at the end of a stream.
_DELTA_USAGE = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
    "output_tokens_details",
    "server_tool_use",
)
PING = named_event("ping", b'{"type":"ping"}')
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def stop_json(reason: str, stop_matched: str) -> Json:
    """Return how an answer ended, in the words of this API."""
    if reason == "stop" and stop_matched:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_matched}
    return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}


def usage_json(usage: TokenUsage) -> Json:
    """Return the usage object. Cached input is not part of `input_tokens` here."""
    cached = cached_tokens(usage)
    return {
        "input_tokens": max(0, usage.prompt_tokens - cached - usage.cache_write_tokens),
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
        "speed": "standard",
        "inference_geo": None,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.cache_write_tokens,
            "ephemeral_1h_input_tokens": 0,
        },
    }


def message_json(message_id: str, model: str, content: list[Json], usage: TokenUsage) -> Json:
    """Return the message object, not ended yet."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "diagnostics": None,
        "usage": usage_json(usage),
    }


@dataclass(slots=True)
class _Block:
    """Part of a whole answer: a text, or a call if it has a name."""

    name: str = ""
    pieces: list[str] = field(default_factory=list)


class WholeMessage:
    """Collects one answer and sends it as JSON."""

    def __init__(
        self, exchange: Exchange, message_id: str, model: str, service_tier: str = "standard"
    ) -> None:
        self._exchange, self._id, self._model = exchange, message_id, model
        self._service_tier = service_tier
        self._blocks: list[_Block] = []
        self._end: Json = {}

    async def begin(self, num_choices: int) -> None:
        """Nothing is sent before the end."""

    def add_text(self, choice_idx: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> None:
        """Keep text."""
        if not self._blocks or self._blocks[-1].name:
            self._blocks.append(_Block())
        self._blocks[-1].pieces.append(text)

    def add_call(self, choice_idx: int, call_idx: int, name: str) -> None:
        """Begin a call."""
        self._blocks.append(_Block(name))

    def add_arguments(self, choice_idx: int, call_idx: int, text: str) -> None:
        """Keep more of the last call's arguments."""
        self._blocks[-1].pieces.append(text)

    def add_finish(self, choice_idx: int, reason: str, stop_matched: str = "") -> None:
        """Keep how it ended."""
        self._end = stop_json(reason, stop_matched)

    async def flush(self) -> None:
        """Nothing is sent before the end."""

    def try_flush(self) -> bool:
        """Nothing is sent before the end."""
        return True

    async def end(self, usage: TokenUsage) -> None:
        """Send everything."""
        message = message_json(self._id, self._model, self._content(), usage)
        message["usage"]["service_tier"] = self._service_tier
        await self._exchange.send_json(200, orjson.dumps({**message, **self._end}))

    async def keep_alive(self, every_s: float) -> None:
        """Nothing is sent before the end."""

    def _content(self) -> list[Json]:
        content: list[Json] = []
        num_calls = 0
        for block in self._blocks:
            text = "".join(block.pieces)
            if block.name:
                use = tool_use(self._id, num_calls, block.name)
                content.append({**use, "input": parsed_arguments(text)})
                num_calls += 1
            else:
                content.append({"type": "text", "text": text, "citations": []})
        return content


class StreamedMessage:
    """Writes one answer as events.

    Args:
        exchange: the connection.
        message_id: its id.
        model: served name.
        usage: counts so far.
        clock: time.
    """

    def __init__(
        self,
        exchange: Exchange,
        message_id: str,
        model: str,
        usage: Callable[[], TokenUsage],
        clock: Clock,
    ) -> None:
        self._id, self._model, self._usage = message_id, model, usage
        self._events = EventStream(exchange, clock, PING)
        self._num_blocks, self._num_calls = 0, 0
        # "", "text" or "tool_use".
        self._open_block = ""
        self._end: Json = {}

    async def begin(self, num_choices: int) -> None:
        """Send the status line and the beginning of the message."""
        message = message_json(self._id, self._model, [], self._usage())
        self._events.add("message_start", {"message": message})
        await self._events.flush()

    def add_text(self, choice_idx: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> None:
        """Queue text."""
        if self._open_block != "text":
            self._begin_block("text", {"type": "text", "text": "", "citations": []})
        self._delta({"type": "text_delta", "text": text})

    def add_call(self, choice_idx: int, call_idx: int, name: str) -> None:
        """Queue the beginning of a call."""
        self._begin_block("tool_use", {**tool_use(self._id, self._num_calls, name), "input": {}})
        self._num_calls += 1

    def add_arguments(self, choice_idx: int, call_idx: int, text: str) -> None:
        """Queue more of the last call's arguments."""
        self._delta({"type": "input_json_delta", "partial_json": text})

    def add_finish(self, choice_idx: int, reason: str, stop_matched: str = "") -> None:
        """Queue the last block's end."""
        self._end_block()
        self._end = stop_json(reason, stop_matched)

    async def flush(self) -> None:
        """Send what is queued in one piece."""
        await self._events.flush()

    def try_flush(self) -> bool:
        """Send what is queued, if nothing must be waited for."""
        return self._events.try_flush()

    async def end(self, usage: TokenUsage) -> None:
        """Send how it ended, and the end."""
        counts = {k: v for k, v in usage_json(usage).items() if k in _DELTA_USAGE}
        self._events.add("message_delta", {"delta": self._end, "usage": counts})
        self._events.add("message_stop", {})
        await self._events.flush(is_last=True)

    async def keep_alive(self, every_s: float) -> None:
        """Send a ping whenever nothing was sent for *every_s*; until cancelled."""
        await self._events.keep_alive(every_s)

    def _begin_block(self, kind: str, block: Json) -> None:
        self._end_block()
        self._open_block = kind
        data = {"index": self._num_blocks, "content_block": block}
        self._events.add("content_block_start", data)
        if self._num_blocks == 0:
            self._events.add("ping", {})

    def _delta(self, delta: Json) -> None:
        self._events.add("content_block_delta", {"index": self._num_blocks, "delta": delta})

    def _end_block(self) -> None:
        if self._open_block:
            self._events.add("content_block_stop", {"index": self._num_blocks})
            self._num_blocks += 1
            self._open_block = ""


def tool_use(message_id: str, call_idx: int, name: str) -> Json:
    """Return a call's block without its input."""
    use_id = call_id(message_id, 0, call_idx, "toolu_")
    return {"type": "tool_use", "id": use_id, "name": name, "caller": {"type": "direct"}}


def parsed_arguments(text: str) -> Any:  # Any: a JSON object, or whatever was cut off
    """Return a call's arguments as JSON values; arguments that were cut off are shown as text."""
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {"_incomplete": text}
