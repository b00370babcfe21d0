"""Tells the guard how much text went to each client: the second witness beside its own count.

In the background and bounded: while the guard is away reports wait; beyond the bound the oldest are
dropped and counted. No answer waits for a report. A guard that is killed takes the records with it
that it had not written: a report that has outlived the connection says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from headrace_common.errors import HeadraceError
from headrace_common.proto_wire import bytes_tag, number_tag, varint, with_length
from headrace_contracts.guard.v1.guard_pb2 import SentReport
from headrace_gateway.answer import Delivery
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.principal import Principal
from headrace_gateway.visit import Visit

MAX_WAITING = 10_000
_RETRY_S = 1.0
# So long reports gather: a call costs about the same whatever it holds, and nobody waits for it.
_GATHER_S = 0.1
# In one call.
_MAX_SENT = 500

_FIELDS = SentReport.DESCRIPTOR.fields_by_name
_REQUEST_ID, _BY_CHOICE = (
    bytes_tag(_FIELDS[it].number) for it in ("request_id", "sent_chars_by_choice")
)
_CHARS, _FAIL_OPEN, _GUARD_LOST = (
    number_tag(_FIELDS[it].number) for it in ("sent_chars", "fail_open", "guard_lost")
)
# Of an entry of a map: https://protobuf.dev/programming-guides/proto3/#backwards
_KEY, _VALUE = number_tag(1), number_tag(2)


# Written behind an encoded report.
_LOST = _GUARD_LOST + varint(1)


class ReportTaker(Protocol):
    """What the guard offers here."""

    @property
    def connection(self) -> object | None:
        """What stands for the connection for as long as it lasts; None while there is none."""
        ...

    async def report_sent(self, reports: Sequence[bytes]) -> None:
        """Take reports, each a `SentReport` as it is on the wire."""
        ...


class _Waiting(NamedTuple):
    encoded: bytes
    # As the answer ended.
    connection: object | None


class SentReports:
    """Queue and sender. Belongs to one event loop.

    Args:
        guard: takes the reports.
        metrics: counts those that were lost.
    """

    def __init__(self, guard: ReportTaker, metrics: GatewayMetrics) -> None:
        self._guard, self._metrics = guard, metrics
        self._waiting: deque[_Waiting] = deque()
        self._filled = asyncio.Event()

    def tell(self, visit: Visit) -> None:
        """Queue the report of a request that has ended, if its answer had begun."""
        if visit.delivery is None:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._metrics.sent_reports_dropped.inc()
        encoded = encoded_report(visit.request_id, visit.principal, visit.delivery)
        self._waiting.append(_Waiting(encoded, self._guard.connection))
        self._filled.set()

    async def run(self) -> None:
        """Send until cancelled; a guard that is away is tried again."""
        while True:
            await self._filled.wait()
            await asyncio.sleep(_GATHER_S)
            self._filled.clear()
            while self._waiting:
                try:
                    await self._send_some()
                except HeadraceError:
                    await asyncio.sleep(_RETRY_S)

    async def flush(self, within_s: float) -> None:
        """Give waiting reports a last chance, once `run` has ended."""
        try:
            async with asyncio.timeout(within_s):
                while self._waiting:
                    await self._send_some()
        except (TimeoutError, HeadraceError):
            self._metrics.sent_reports_dropped.inc(len(self._waiting))
            self._waiting.clear()

    async def _send_some(self) -> None:
        """Send what waits, up to a bound; what was dropped meanwhile is not dropped again."""
        reports = list(islice(self._waiting, _MAX_SENT))
        now = self._guard.connection
        await self._guard.report_sent(
            [
                it.encoded if now is not None and it.connection is now else it.encoded + _LOST
                for it in reports
            ]
        )
        for report in reports:
            if self._waiting and self._waiting[0] is report:
                self._waiting.popleft()


def encoded_report(request_id: str, principal: Principal, delivery: Delivery) -> bytes:
    """Return the `SentReport` of an answer as it is on the wire."""
    pieces = [_REQUEST_ID, with_length(request_id.encode()), principal.report_head]
    for choice_idx, num_chars in delivery.sent_chars.items():
        pieces += (_BY_CHOICE, with_length(_KEY + varint(choice_idx) + _VALUE + varint(num_chars)))
    pieces += (_CHARS, varint(sum(delivery.sent_chars.values())))
    if delivery.went_unguarded:
        pieces += (_FAIL_OPEN, varint(1))
    if delivery.lost_the_guard:
        pieces.append(_LOST)
    return b"".join(pieces)
