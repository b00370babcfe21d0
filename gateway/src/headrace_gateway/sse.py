"""A streamed answer on the wire: order of events, comments against idle proxies, usage, the end.

::

    (opening delta* finish)+ per choice, interleaved --> [usage] --> [DONE]
    : keep-alive                                          whenever nothing was sent for 10 s

Nothing is sent, not even a status line, before a worker has begun or `silent_start_s` is over: see
`kept_alive`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from headrace_common.clock import Clock
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.worker.v1.worker_pb2 import TokenLogprob
from headrace_gateway.answer_format import AnswerFormat, ToolFormat, usage_json
from headrace_gateway.api_request import StreamOptions
from headrace_gateway.event_stream import EventWriter
from headrace_gateway.visit import Exchange

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_NO_USAGE, _NULL_USAGE = b"", b',"usage":null'


class StreamedAnswer(EventWriter):
    """Writes one answer as server-sent events.

    Args:
        exchange: the connection.
        form: the endpoint's chunks.
        options: whether usage is wanted.
        usage: counts so far.
        clock: time.
        tools: the shapes of calls; None = the endpoint takes no tools.
    """

    def __init__(
        self,
        exchange: Exchange,
        form: AnswerFormat,
        options: StreamOptions,
        usage: Callable[[], TokenUsage],
        clock: Clock,
        tools: ToolFormat | None = None,
    ) -> None:
        super().__init__(exchange, clock, KEEP_ALIVE)
        self._form, self._options, self._usage, self._tools = form, options, usage, tools
        self._no_usage = _NULL_USAGE if options.include_usage else _NO_USAGE

    async def begin(self, num_choices: int) -> None:
        """Send the status line and the openings."""
        for choice_idx in range(num_choices):
            if opening := self._form.opening(choice_idx):
                self.put(opening[:-3] + self._usage_part() + opening[-3:])
        await self.flush()

    def add_text(self, choice_idx: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> None:
        """Queue text for the next `flush`."""
        usage = self._usage_part() if self._options.continuous_usage else self._no_usage
        self._waiting.append(self._form.delta(choice_idx, text, logprobs, usage))

    def add_call(self, choice_idx: int, call_idx: int, name: str) -> None:
        """Queue the beginning of a call for the next `flush`."""
        if self._tools is not None:
            part = self._usage_part()
            self.put(self._tools.call(choice_idx, call_idx, name, part))

    def add_arguments(self, choice_idx: int, call_idx: int, text: str) -> None:
        """Queue more of a call's arguments for the next `flush`."""
        if self._tools is not None:
            part = self._usage_part()
            self.put(self._tools.arguments(choice_idx, call_idx, text, part))

    def add_finish(self, choice_idx: int, reason: str, stop_matched: str = "") -> None:
        """Queue a choice's end for the next `flush`."""
        self.put(self._form.finish(choice_idx, reason, self._usage_part()))

    async def end(self, usage: TokenUsage) -> None:
        """Send the usage, if asked for, and the end."""
        last = self._form.usage_chunk(usage) if self._options.include_usage else b""
        self.put(last + DONE)
        await self.flush(is_last=True)

    def _usage_part(self) -> bytes:
        if self._options.continuous_usage:
            return b',"usage":' + orjson.dumps(usage_json(self._usage()))
        return self._no_usage
