"""The shapes of a response: whole, and as the typed events of a stream.

::

    response.created response.in_progress
      ( response.output_item.added
          response.content_part.added response.output_text.delta* response.output_text.done
          response.content_part.done                              | or for a call:
          response.function_call_arguments.delta* .done           | of a custom tool:
          response.custom_tool_call_input.delta* .done
        response.output_item.done )*
    response.completed | response.incomplete

Every event has the next `sequence_number`. A response that fails ends, after any of these, with
response.failed, which is not told here: see `WatchedExchange.end_failed` and `BackgroundResponses`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import orjson

from headrace_common.clock import Clock
from headrace_common.price_rows import cached_tokens
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.worker.v1.worker_pb2 import TokenLogprob
from headrace_gateway.answer_extras import Json
from headrace_gateway.answer_format import chat_logprobs
from headrace_gateway.event_stream import EventStream
from headrace_gateway.responses_api.tools import OfferedFunction, called_as
from headrace_gateway.tool_calls import call_id
from headrace_gateway.visit import Exchange

KEEP_ALIVE = b": keep-alive\n\n"
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Keeps the finished object; returns what is told to the client.
OnEnd = Callable[[Json], Awaitable[Json]]


def usage_json(usage: TokenUsage) -> Json:
    """Return the usage object."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": cached_tokens(usage),
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def fresh_response(response_id: str, model: str, created_s: int, echo: Json) -> Json:
    """Return a response that nothing has come of yet."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **echo,
    }


@dataclass(slots=True)
class _Item:
    """An item under way: a message, or a call if it has a name."""

    item_id: str
    name: str = ""
    # Of a call, and only where the function stands in one.
    namespace: str = ""
    call_id: str = ""
    is_custom: bool = False
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def text_field(self) -> str:
        """How a call's text is called."""
        return "input" if self.is_custom else "arguments"

    @property
    def events(self) -> str:
        """How the events of a call's text begin."""
        what = "custom_tool_call_input" if self.is_custom else "function_call_arguments"
        return f"response.{what}"

    def as_json(self, status: str) -> Json:
        text = "".join(self.pieces)
        if self.name:
            call = {
                "id": self.item_id,
                "type": "custom_tool_call" if self.is_custom else "function_call",
                "status": status,
                "call_id": self.call_id,
                "name": self.name,
                self.text_field: text,
            }
            return {**call, "namespace": self.namespace} if self.namespace else call
        part = output_text(text, self.logprobs)
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if status == "in_progress" else [part],
        }


def output_text(text: str, logprobs: list[Json]) -> Json:
    """Return a part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ResponseSink:
    """Puts one response together, and if it is streamed tells of every step.

    Args:
        exchange: the connection.
        response: as `fresh_response` made it; is filled in.
        clock: time.
        on_end: keeps the finished response before its end is told.
        functions: which the model may call.
        is_stream: whether events are sent.
    """

    def __init__(
        self,
        exchange: Exchange,
        response: Json,
        clock: Clock,
        on_end: OnEnd,
        functions: Sequence[OfferedFunction] = (),
        *,
        is_stream: bool,
    ) -> None:
        self._exchange, self._response, self._clock = exchange, response, clock
        self._on_end, self._functions = on_end, functions
        self._events = EventStream(exchange, clock, KEEP_ALIVE) if is_stream else None
        self._serial = response["id"].removeprefix("resp_")
        self._done: list[Json] = []
        self._item: _Item | None = None
        self._num_calls = 0
        self._reason = ""

    async def begin(self, num_choices: int) -> None:
        """Send the status line and the beginning."""
        if not self._exchange.num_events:
            self._tell("response.created", {"response": self._response})
        self._tell("response.in_progress", {"response": self._response})
        await self.flush()

    def add_text(self, choice_idx: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> None:
        """Add text to the message."""
        if self._item is None or self._item.name:
            if not text:
                # Log probabilities of what spells a call.
                return
            self._begin_message()
        if self._item is None:
            return
        told = chat_logprobs(logprobs)["content"] if logprobs else []
        self._item.pieces.append(text)
        self._item.logprobs += told
        self._tell_part("response.output_text.delta", {"delta": text, "logprobs": told})

    def add_call(self, choice_idx: int, call_idx: int, name: str) -> None:
        """Begin a call."""
        self._end_item("completed")
        is_custom = any(it.is_custom and it.shown_name == name for it in self._functions)
        item_id = f"{'ctc' if is_custom else 'fc'}_{self._serial}{len(self._done)}"
        its_id = call_id(self._serial, 0, self._num_calls)
        named = called_as(name, self._functions)
        self._item = _Item(item_id, call_id=its_id, is_custom=is_custom, **named)
        self._num_calls += 1
        self._tell_item("response.output_item.added", "in_progress")

    def add_arguments(self, choice_idx: int, call_idx: int, text: str) -> None:
        """Add to the last call's arguments."""
        if self._item is not None:
            self._item.pieces.append(text)
            data = {"item_id": self._item.item_id, "output_index": len(self._done), "delta": text}
            self._tell(f"{self._item.events}.delta", data)

    def add_finish(self, choice_idx: int, reason: str, stop_matched: str = "") -> None:
        """End the last item."""
        self._reason = reason
        self._end_item("incomplete" if reason in _INCOMPLETE else "completed")

    async def flush(self) -> None:
        """Send what is queued."""
        if self._events is not None:
            await self._events.flush()

    def try_flush(self) -> bool:
        """Send what is queued, if nothing must be waited for."""
        return self._events is None or self._events.try_flush()

    async def end(self, usage: TokenUsage) -> None:
        """Keep the response, then tell its end."""
        incomplete = _INCOMPLETE.get(self._reason)
        self._response.update(
            status="incomplete" if incomplete else "completed",
            completed_at=None if incomplete else int(self._clock.unix_s()),
            incomplete_details={"reason": incomplete} if incomplete else None,
            output=self._done,
            usage=usage_json(usage),
        )
        told = await self._on_end(self._response)
        if self._events is None:
            await self._exchange.send_json(200, orjson.dumps(told))
        else:
            self._tell(f"response.{told['status']}", {"response": told})
            await self._events.flush(is_last=True)

    async def keep_alive(self, every_s: float) -> None:
        """Send a comment whenever nothing was sent for *every_s*; until cancelled."""
        if self._events is not None:
            await self._events.keep_alive(every_s)

    def _begin_message(self) -> None:
        self._end_item("completed")
        self._item = _Item(f"msg_{self._serial}{len(self._done)}")
        self._tell_item("response.output_item.added", "in_progress")
        self._tell_part("response.content_part.added", {"part": output_text("", [])})

    def _end_item(self, status: str) -> None:
        item = self._item
        if item is None:
            return
        text = "".join(item.pieces)
        if item.name:
            data = {"item_id": item.item_id, "output_index": len(self._done)}
            named = {} if item.is_custom else {"name": item.name}
            self._tell(f"{item.events}.done", {**data, **named, item.text_field: text})
        else:
            self._tell_part("response.output_text.done", {"text": text, "logprobs": item.logprobs})
            self._tell_part(
                "response.content_part.done", {"part": output_text(text, item.logprobs)}
            )
        self._tell_item("response.output_item.done", status)
        self._done.append(item.as_json(status))
        self._item = None

    def _tell_item(self, kind: str, status: str) -> None:
        if self._item is not None:
            data = {"output_index": len(self._done), "item": self._item.as_json(status)}
            self._tell(kind, data)

    def _tell_part(self, kind: str, data: Json) -> None:
        if self._item is not None:
            where = {
                "item_id": self._item.item_id,
                "output_index": len(self._done),
                "content_index": 0,
            }
            self._tell(kind, {**where, **data})

    def _tell(self, kind: str, data: Json) -> None:
        if self._events is not None:
            self._events.add(kind, {"sequence_number": self._events.num_events, **data})
