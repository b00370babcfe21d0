"""Exactly one closed event per admitted request, whatever the ending: outbox and relay together.

::

    opened(event) --> [request runs] --> closed(event), durable --> the last bytes go to the client
         |                                    ^
         '-- the process dies --> restart ----' closed as ENDING_SWEPT, estimated, nothing used

Billing books a swept event by the worker's own count if it has one: the gateway knows no better.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from headrace_common.clock import Clock, unix_us
from headrace_common.errors import Unavailable
from headrace_common.lifecycle import cancel_and_wait, supervise
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import ENDING_SWEPT, UsageEvent
from headrace_gateway.left_outboxes import LeftOutboxes
from headrace_gateway.outbox import Outbox
from headrace_gateway.outbox_metrics import OutboxMetrics
from headrace_gateway.relay import BillingLedger, KafkaSink, Relay

_log = logging.getLogger(__name__)

# A request whose deadline passed this long ago holds no segment back any more; billing's sweeper
# takes over. Microseconds.
_PIN_AFTER_DEADLINE_US = 60_000_000


class OutboxUsageLog:
    """The one way usage leaves the gateway: a `UsageLog` on disk. Belongs to one event loop.

    Args:
        outbox: not started.
        relay: not started; None = events stay on disk.
        clock: for swept events and pins.
        metrics: shared with outbox and relay.
        left: of outboxes with seats, what others have left in theirs; None = nobody looks.
    """

    def __init__(
        self,
        outbox: Outbox,
        relay: Relay | None,
        clock: Clock,
        metrics: OutboxMetrics,
        left: LeftOutboxes | None = None,
    ) -> None:
        self._outbox, self._relay = outbox, relay
        self._clock, self._metrics, self._left = clock, metrics, left
        self._emptying: asyncio.Task[None] | None = None
        # Deadline (Unix microseconds) of each request under way.
        self._open: dict[str, int] = {}
        if relay is not None:
            relay.is_pinned = self._is_open

    @classmethod
    def build(
        cls,
        folder: Path,
        kafka_bootstrap: str,
        billing_address: str,
        clock: Clock,
        metrics: OutboxMetrics,
        *,
        topic_replicas: int = 0,
        num_seats: int = 0,
    ) -> OutboxUsageLog:
        """Wire the log to a folder, the broker and billing. None of them needs to be up."""
        outbox = Outbox(folder, clock, metrics, num_seats=num_seats)
        sink = KafkaSink(kafka_bootstrap, "headrace-gateway", topic_replicas)
        relay = Relay(outbox, sink, BillingLedger(billing_address), clock, metrics)
        left = None
        if num_seats:
            left_metrics = metrics.of_another()
            left = LeftOutboxes(
                folder,
                lambda place: cls.build(
                    place,
                    kafka_bootstrap,
                    billing_address,
                    clock,
                    left_metrics,
                    topic_replicas=topic_replicas,
                ),
            )
        return cls(outbox, relay, clock, metrics, left)

    @property
    def is_empty(self) -> bool:
        """Whether the ledger has all that was ever written here."""
        return self._outbox.size_bytes == 0

    @property
    def is_full(self) -> bool:
        """Whether billable work must be refused: the disk is full or refuses writes."""
        return self._outbox.is_full

    async def start(self) -> None:
        """Take the folder, close what a dead process left open, begin to relay.

        Raises:
            OutboxInUseError: another gateway has the folder.
        """
        for orphan in await self._outbox.start():
            self._outbox.append(self._swept(orphan))
            self._metrics.swept.inc()
            _log.warning("request %s was left open by a dead process", orphan.request_id)
        if self._relay is not None:
            await self._relay.start()
        if self._left is not None:
            body = supervise("outboxes that were left", self._left.keep)
            self._emptying = asyncio.create_task(body)

    def opened(self, event: UsageEvent) -> asyncio.Future[None]:
        """Record that a request was admitted.

        Returns:
            Done once that is on disk, or the disk refused: see `until_recorded`.

        Raises:
            Unavailable: the outbox is full; the request must be refused.
        """
        if self.is_full:
            raise Unavailable("Usage cannot be recorded at the moment. Try again later.")
        self._open[event.request_id] = event.deadline_unix_us
        recorded = self._outbox.append_watched(event)
        if event.streaming:
            # The first byte will wait for it: written while a replica is chosen and begins.
            self._outbox.hurry()
        return recorded

    async def until_recorded(self, recorded: asyncio.Future[None]) -> None:
        """Wait for what `opened` returned; nearly always it is there before the first token.

        A client that has seen a byte must find its request in the ledger, whenever we die.
        """
        if not recorded.done():
            self._outbox.hurry()
            await asyncio.wait({recorded})

    def closed(self, event: UsageEvent) -> asyncio.Future[None]:
        """Record how a request ended.

        Returns:
            Done once that is on disk; with `Unavailable` if the disk refused. The event is kept in
            memory then, and written once it can be.
        """
        recorded = self._outbox.append_hurried(event)
        recorded.add_done_callback(partial(self._forget, event.request_id))
        return recorded

    def _forget(self, request_id: str, recorded: asyncio.Future[None]) -> None:
        if not recorded.cancelled() and recorded.exception() is None:
            self._open.pop(request_id, None)

    async def close(self) -> None:
        """Write what is queued, hand over what the broker takes within a second, stop."""
        await cancel_and_wait(self._emptying)
        if self._relay is not None:
            await self._relay.close()
        await self._outbox.close()

    def _is_open(self, request_id: str) -> bool:
        deadline_us = self._open.get(request_id)
        if deadline_us is None:
            return False
        if unix_us(self._clock) <= deadline_us + _PIN_AFTER_DEADLINE_US:
            return True
        del self._open[request_id]
        return False

    def _swept(self, opened: UsageEvent) -> UsageEvent:
        now_us = unix_us(self._clock)
        return UsageEvent(
            kind=UsageEvent.KIND_CLOSED,
            request_id=opened.request_id,
            tenant_id=opened.tenant_id,
            project_id=opened.project_id,
            key_id=opened.key_id,
            model=opened.model,
            price_version=opened.price_version,
            price_tier=opened.price_tier,
            occurred_unix_us=now_us,
            # Fixes the price: a request waits for its verdict between admission and `opened`.
            admitted_unix_us=opened.admitted_unix_us,
            # Until it was found.
            duration_s=max(0, now_us - opened.occurred_unix_us) / 1e6,
            usage=TokenUsage(),
            ending=ENDING_SWEPT,
            estimated=True,
            endpoint=opened.endpoint,
            streaming=opened.streaming,
        )
