"""Usage of what is tried more than once: one request in the books, whichever process tries it.

::

    opened --> [try fails, or is cut off] --> [another try, here or elsewhere] --> closed, once
                                          '-> no more: `close_request`, by the last try's event
               [the process dies] --> swept like any request, corrected by a later try's close

A try that did not answer is not the request's end: closed by it, the ledger would take the answer
that comes after it for a repetition.
"""

from __future__ import annotations

import asyncio

from headrace_contracts.usage.v1.usage_pb2 import (
    ENDING_COMPLETED,
    ENDING_OUTPUT_BLOCKED,
    UsageEvent,
)
from headrace_gateway.usage_events import UsageLog

_ANSWERED = (ENDING_COMPLETED, ENDING_OUTPUT_BLOCKED)


class TriesLog:
    """A `UsageLog` for tries of requests. Belongs to one event loop.

    Args:
        log: where events go; whoever made it starts and closes it.
    """

    def __init__(self, log: UsageLog) -> None:
        self._log = log
        # Requests opened and not closed, with what their last try ended with.
        self._open: dict[str, UsageEvent | None] = {}
        # Answered, and closed, until `close_request` says that the answer is kept.
        self._answered: set[str] = set()

    @property
    def is_full(self) -> bool:
        """Whether no further request can be recorded."""
        return self._log.is_full

    async def start(self) -> None:
        """Nothing is taken over."""

    async def close(self) -> None:
        """Nothing is written: what is open is for another process to go on with."""

    def opened(self, event: UsageEvent) -> asyncio.Future[None]:
        """Append, unless an earlier try did."""
        if event.request_id in self._open:
            return _done()
        self._answered.discard(event.request_id)
        recorded = self._log.opened(event)
        self._open[event.request_id] = None
        return recorded

    async def until_recorded(self, recorded: asyncio.Future[None]) -> None:
        """Wait for what `opened` returned."""
        await self._log.until_recorded(recorded)

    def closed(self, event: UsageEvent) -> asyncio.Future[None]:
        """Append the end of a try that answered; keep that of another for `close_request`."""
        if event.ending in _ANSWERED:
            self._open.pop(event.request_id, None)
            self._answered.add(event.request_id)
            return self._log.closed(event)
        self._open[event.request_id] = event
        return _done()

    def is_answered(self, request_id: str) -> bool:
        """Whether a request is in the books with an answer that is not kept yet."""
        return request_id in self._answered

    def close_request(self, request_id: str) -> None:
        """Append the end of a request that gets no further try, if one of its tries was opened."""
        self._answered.discard(request_id)
        event = self._open.pop(request_id, None)
        if event is not None:
            self._log.closed(event)

    def forget(self, request_id: str) -> None:
        """Leave a request open: another process goes on with it."""
        self._answered.discard(request_id)
        self._open.pop(request_id, None)


def _done() -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
