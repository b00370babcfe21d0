"""Carries usage events from the outbox to the ledger, at least once, whatever breaks on the way.

Supervised loops. One reads new events and produces them; how far the broker has acknowledged is
saved once a second. Another asks billing which events of finished segments are not booked: a
segment with none missing is deleted, events that miss for longer than a grace period after their
acknowledgement are produced again. So a broker that loses its memory loses nothing; it only makes
work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.partitioner import DefaultPartitioner

from headrace_common.clock import Clock
from headrace_common.kafka_client import USAGE_TOPIC, ensure_topics, producer
from headrace_common.lifecycle import cancel_and_wait, supervise
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.billing.v1 import billing_pb2
from headrace_contracts.billing.v1.billing_pb2 import (
    EventId,
    FindMissingRequest,
    FindMissingResponse,
)
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_gateway.outbox import Batch, Outbox
from headrace_gateway.outbox_metrics import OutboxMetrics
from headrace_gateway.segments import Position, replace_file

_log = logging.getLogger(__name__)

FIND_MISSING = method_ref(
    billing_pb2.DESCRIPTOR.services_by_name["Ledger"],
    "FindMissing",
    FindMissingRequest,
    FindMissingResponse,
)
GRACE_S = 10.0
CONFIRM_INTERVAL_S = 2.0
_BATCH_EVENTS = 500
# Asked for at once: to read so many takes the loop less than a millisecond.
_CONFIRM_EVENTS = 100
# So long events gather before they are produced, under load too: a batch costs 2 ms of the loop's
# time, whatever it holds, and requests wait meanwhile.
GATHER_S = 0.1
# The position is saved so often: what was produced since is produced again after a crash.
_SAVE_EVERY_S = 1.0
_MEASURE_EVERY_S = 1.0
_PARTITIONER = DefaultPartitioner()
_STEP_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 2.0
_BILLING_TIMEOUT_S = 5.0

# (request id, kind): what identifies an event in the ledger.
Identity = tuple[str, int]


class Sink(Protocol):
    """Where events go."""

    async def send(self, events: list[UsageEvent]) -> None:
        """Connect if need be and return once all are acknowledged; raise if that is not sure."""
        ...

    async def stop(self) -> None:
        """Disconnect, in bounded time."""
        ...


class Ledger(Protocol):
    """Who knows what is booked."""

    async def find_missing(self, events: list[UsageEvent]) -> set[Identity]:
        """Return the identities of the events that are not booked."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


class KafkaSink:
    """The topic `usage.v1`, keyed by tenant. Every wait is bounded, whatever aiokafka does."""

    def __init__(self, bootstrap_servers: str, client_id: str, topic_replicas: int = 0) -> None:
        self._bootstrap, self._client_id = bootstrap_servers, client_id
        self._topic_replicas = topic_replicas
        self._producer: AIOKafkaProducer | None = None
        self._sending = asyncio.Lock()

    async def send(self, events: list[UsageEvent]) -> None:
        """Produce and wait for all acknowledgements; after a failure the next call reconnects."""
        async with self._sending:
            try:
                async with asyncio.timeout(_STEP_TIMEOUT_S):
                    await self._produce(await self._connected(), events)
            except BaseException:
                await self._leave()
                raise

    async def stop(self) -> None:
        """Disconnect; a broker that does not answer is left behind."""
        async with self._sending:
            await self._leave()

    async def _connected(self) -> AIOKafkaProducer:
        if self._producer is None:
            # A broker that came back empty has forgotten the topic.
            await ensure_topics(self._bootstrap, [USAGE_TOPIC], self._topic_replicas)
            self._producer = producer(self._bootstrap, self._client_id)
            await self._producer.start()
        return self._producer

    async def _produce(self, kafka: AIOKafkaProducer, events: list[UsageEvent]) -> None:
        acks: list[asyncio.Future[object]] = []
        try:
            for partition, records in (await _by_partition(kafka, events)).items():
                # Whole batches: a message sent by itself costs five times the CPU.
                batch = kafka.create_batch()
                for key, value in records:
                    if batch.append(timestamp=None, key=key, value=value) is None:
                        acks.append(await kafka.send_batch(batch, USAGE_TOPIC, partition=partition))
                        batch = kafka.create_batch()
                        batch.append(timestamp=None, key=key, value=value)
                acks.append(await kafka.send_batch(batch, USAGE_TOPIC, partition=partition))
            await asyncio.gather(*acks)
        finally:
            for ack in acks:
                # Marks a failure as seen: asyncio would complain of the ones behind the first.
                ack.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _leave(self) -> None:
        lost, self._producer = self._producer, None
        if lost is None:
            return
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await lost.stop()
            return
        # aiokafka flushes before it stops (aiokafka issue 1101); what is left is on our disk.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await lost._sender.close()
                await lost.client.close()


async def _by_partition(
    kafka: AIOKafkaProducer, events: list[UsageEvent]
) -> dict[int, list[tuple[bytes, bytes]]]:
    """Group events as keys and values by where their tenant's events go, in order."""
    partitions = sorted(await kafka.partitions_for(USAGE_TOPIC))
    places: dict[bytes, int] = {}
    records: dict[int, list[tuple[bytes, bytes]]] = {}
    for event in events:
        key = event.tenant_id.encode()
        place = places.get(key)
        if place is None:
            place = places[key] = _PARTITIONER(key, partitions, partitions)
        records.setdefault(place, []).append((key, event.SerializeToString()))
    return records


class BillingLedger:
    """Billing's books over its session."""

    def __init__(self, address: str) -> None:
        self._client = SessionClient(address)

    async def find_missing(self, events: list[UsageEvent]) -> set[Identity]:
        """Ask billing."""
        request = FindMissingRequest(
            events=[EventId(request_id=event.request_id, kind=event.kind) for event in events]
        )
        answer = await self._client.unary(FIND_MISSING, request, timeout_s=_BILLING_TIMEOUT_S)
        return {(event.request_id, event.kind) for event in answer.missing}

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()


class Relay:
    """Moves the outbox's events to the sink until the ledger has them. Belongs to one event loop.

    Args:
        outbox: started before the relay.
        sink: where events go.
        ledger: who confirms them.
        clock: for the grace period.
        metrics: shared with the outbox.
        is_pinned: whether a request is still under way: its segment is kept even when booked, so
            that a restart after a crash finds what was open.
        grace_s: how long after its acknowledgement an event may be missing from the ledger.
        confirm_interval_s: pause between two rounds of questions.
    """

    def __init__(
        self,
        outbox: Outbox,
        sink: Sink,
        ledger: Ledger,
        clock: Clock,
        metrics: OutboxMetrics,
        *,
        is_pinned: Callable[[str], bool] = lambda _request_id: False,
        grace_s: float = GRACE_S,
        confirm_interval_s: float = CONFIRM_INTERVAL_S,
    ) -> None:
        self.is_pinned = is_pinned
        self._outbox, self._sink, self._ledger = outbox, sink, ledger
        self._clock, self._metrics = clock, metrics
        self._grace_s, self._confirm_interval_s = grace_s, confirm_interval_s
        self._position = Position(0, 0)
        self._acked_seq = self._saved_seq = 0
        self._oldest_unacked_unix_us = 0
        self._acked_at_s: dict[int, float] = {}
        self._started_s = 0.0
        self._caught_up = asyncio.Event()
        self._is_closing = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_pending(self) -> int:
        """Events on disk that the broker has not acknowledged."""
        return max(0, self._outbox.durable_seq - self._acked_seq)

    async def start(self) -> None:
        """Go on where the last process stopped."""
        self._position, self._acked_seq = await asyncio.to_thread(self._load)
        self._saved_seq = self._acked_seq
        self._started_s = self._clock.now_s()
        # A position that cannot be saved says nothing of broker and billing.
        count = self._metrics.relay_failures.inc
        for name, body, on_failure in (
            ("usage relay", self._produce_forever, count),
            ("usage confirmation", self._confirm_forever, count),
            ("usage backlog", self._measure_forever, None),
            ("usage position", self._save_forever, None),
        ):
            self._tasks.append(asyncio.create_task(supervise(name, body, on_failure=on_failure)))

    async def close(self, drain_s: float = 1.0) -> None:
        """Stop; what the broker did not take within *drain_s* waits on disk for the next start."""
        self._is_closing.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.num_pending:
                    self._caught_up.clear()
                    await self._caught_up.wait()
        await cancel_and_wait(*self._tasks)
        # Nothing runs any more that holds a segment back. One that stayed behind later ones would
        # look like requests without an end to whoever has the folder next.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(drain_s):
                await self._confirm_all()
        with contextlib.suppress(OSError):
            await self._save_position()
        await self._sink.stop()
        await self._ledger.close()

    async def _produce_forever(self) -> None:
        while True:
            self._outbox.grown.clear()
            batch = await self._outbox.read(self._position, _BATCH_EVENTS)
            if batch.payloads:
                await self._produce(batch)
            else:
                self._oldest_unacked_unix_us = 0
                self._caught_up.set()
                await self._outbox.grown.wait()
            if len(batch.payloads) < _BATCH_EVENTS:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GATHER_S):
                        await self._is_closing.wait()

    async def _produce(self, batch: Batch) -> None:
        events = [UsageEvent.FromString(payload) for payload in batch.payloads]
        self._oldest_unacked_unix_us = events[0].occurred_unix_us
        await self._sink.send(events)
        self._position, self._acked_seq = batch.end, events[-1].outbox_seq
        self._acked_at_s[batch.end.segment] = self._clock.now_s()

    async def _confirm_forever(self) -> None:
        while True:
            await asyncio.sleep(self._confirm_interval_s)
            await self._confirm_all()

    async def _confirm_all(self) -> None:
        for segment in self._outbox.finished_segments():
            if segment < self._first_unacked_segment() and await self._confirm(segment):
                await self._outbox.delete(segment)
                self._acked_at_s.pop(segment, None)

    def _first_unacked_segment(self) -> int:
        # A position at the very end of a finished segment is as good as one in the next.
        return self._position.segment if self.num_pending else self._outbox.newest_segment

    async def _confirm(self, segment: int) -> bool:
        """Ask for one segment; produce again what misses for too long. True: it may go."""
        payloads = await self._outbox.read_finished(segment)
        may_go, again = True, 0
        for idx in range(0, len(payloads), _CONFIRM_EVENTS):
            events = [UsageEvent.FromString(p) for p in payloads[idx : idx + _CONFIRM_EVENTS]]
            missing = await self._ledger.find_missing(events)
            lost = [event for event in events if (event.request_id, event.kind) in missing]
            if lost and self._is_overdue(segment):
                await self._sink.send(lost)
                again += len(lost)
            if lost or any(self.is_pinned(event.request_id) for event in events):
                may_go = False
        if again:
            self._metrics.produced_again.inc(again)
            self._acked_at_s[segment] = self._clock.now_s()
        return may_go

    def _is_overdue(self, segment: int) -> bool:
        acked_at_s = self._acked_at_s.get(segment, self._started_s)
        return self._clock.now_s() - acked_at_s >= self._grace_s

    async def _measure_forever(self) -> None:
        while True:
            self._metrics.pending_events.set(self.num_pending)
            self._metrics.pending_bytes.set(self._outbox.size_bytes)
            # The producing loop forgets the oldest event a moment after its acknowledgement.
            oldest_us = self._oldest_unacked_unix_us if self.num_pending else 0
            age_s = self._clock.unix_s() - oldest_us / 1e6 if oldest_us else 0.0
            self._metrics.oldest_age_s.set(max(0.0, age_s))
            await asyncio.sleep(_MEASURE_EVERY_S)

    async def _save_forever(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            await self._save_position()

    async def _save_position(self) -> None:
        if self._saved_seq != self._acked_seq:
            position, seq = self._position, self._acked_seq
            await asyncio.to_thread(self._save, position, seq)
            self._saved_seq = seq

    def _load(self) -> tuple[Position, int]:
        try:
            saved = json.loads((self._outbox.folder / "position").read_bytes())
            return Position(int(saved["segment"]), int(saved["offset"])), int(saved["seq"])
        except FileNotFoundError:
            return Position(0, 0), 0
        except (ValueError, KeyError, TypeError):
            _log.warning("the relay's position cannot be read; all events are produced again")
            return Position(0, 0), 0

    def _save(self, position: Position, seq: int) -> None:
        saved = {"segment": position.segment, "offset": position.offset, "seq": seq}
        # Not synced: after a crash of the machine an old or a broken one only costs duplicates.
        replace_file(self._outbox.folder / "position", json.dumps(saved).encode(), is_synced=False)
