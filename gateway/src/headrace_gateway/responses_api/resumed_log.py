"""The events of a background response that another process began.

It is made anew from its beginning, by the same request id and so with the same seed: the text comes
out the same, but cut into other pieces. What was told before is left out, at the end within a
piece, so that who comes back by the last number he saw reads on as if nothing had happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import orjson

from headrace_gateway.answer_extras import Json
from headrace_gateway.event_stream import named_event
from headrace_gateway.responses_api.event_log import EventLog, pieces_of

# Told when a response is queued; whoever goes on with it does not say so again.
_QUEUED = ("response.created", "response.queued")


class DivergedError(Exception):
    """What was told before its process ended does not come again: it cannot be gone on from."""


class ResumedLog(EventLog):
    """Goes on from the events that are kept.

    Args:
        response_id: whose events.
        keep_alive_s: see `EventLog`.
        attempt: of those to make this response.
        told: the events that are kept, in order.
    """

    def __init__(
        self, response_id: str, keep_alive_s: float, attempt: int, told: Sequence[bytes]
    ) -> None:
        super().__init__(response_id, keep_alive_s, attempt)
        self.events = list(told)
        self.num_events = self.num_kept = len(told)
        # What is to come once more.
        self._again = deque(it for it in map(_data, told) if it["type"] not in _QUEUED)
        # Of the item under way: log probabilities told before, and come again.
        self._told_logprobs = self._num_logprobs = 0

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        """Take events; of those told before, only what is new.

        Raises:
            DivergedError: they say something else than before.
        """
        fresh = [it for it in map(self._unsaid, map(_data, pieces_of(events))) if it is not None]
        first = len(self.events)
        numbered = [{**it, "sequence_number": first + idx} for idx, it in enumerate(fresh)]
        self._add([named_event(it["type"], orjson.dumps(it)) for it in numbered], is_last=is_last)

    def _unsaid(self, event: Json) -> Json | None:
        """Return what is new of an event; None = nothing."""
        kind = event["type"]
        if kind.endswith(".delta"):
            return self._unsaid_delta(event)
        if kind == "response.output_item.added":
            self._told_logprobs = self._num_logprobs = 0
        if not self._again:
            return event
        self._take(kind)
        return None

    def _unsaid_delta(self, event: Json) -> Json | None:
        kind, text, again = event["type"], event["delta"], self._again
        was_behind = bool(again)
        while again and (text or again[0].get("delta") == ""):
            text = self._cut(text, self._take(kind))
        logprobs = event.get("logprobs", [])
        num_said = max(0, self._told_logprobs - self._num_logprobs)
        self._num_logprobs += len(logprobs)
        if again or (was_behind and not text):
            return None
        return {**event, "delta": text, **({"logprobs": logprobs[num_said:]} if logprobs else {})}

    def _cut(self, text: str, told: Json) -> str:
        """Return what of a text comes behind what was told."""
        was: str = told["delta"]
        common = min(len(text), len(was))
        if text[:common] != was[:common]:
            raise DivergedError
        if common < len(was):
            # Counted once, with its end.
            self._again.appendleft({**told, "delta": was[common:]})
        else:
            self._told_logprobs += len(told.get("logprobs", ()))
        return text[common:]

    def _take(self, kind: str) -> Json:
        told = self._again.popleft()
        if told["type"] != kind:
            raise DivergedError
        return told


def _data(event: bytes) -> Json:
    data: Json = orjson.loads(event.partition(b"\ndata: ")[2])
    return data
