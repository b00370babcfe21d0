"""Compares what the log and the workers know with what is booked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Protocol

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from sqlalchemy import Connection, or_, select

from headrace_billing import schema
from headrace_billing.deliveries import EventKey, parse
from headrace_billing.desk import Desk
from headrace_billing.ledger import CLOSED, best_witness, corrected_id, correction_ids
from headrace_billing.usage_store import find_missing
from headrace_common import kafka_client
from headrace_common.ids import jobs_prefix, request_of
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent, WorkerUsage

_log = logging.getLogger(__name__)
MAX_PROBLEMS = 100
_PIECE_REQUESTS = 1000
_BROKER_TIMEOUT_S = 10.0
# So many fetches without any news are an absent broker.
_POLL_MS, _MAX_IDLE = 500, 20
# What was sent a moment ago may be on its way into the books.
_PATIENCE_S = 2.0


class LogReader(Protocol):
    """Reads the usage log from its beginning to its end."""

    def batches(self) -> AsyncIterator[Sequence[bytes]]:
        """Yield the messages' values.

        Raises:
            KafkaError: the log cannot be read.
            OSError: likewise.
            TimeoutError: likewise.
        """
        ...


class KafkaLog:
    """The usage topic of a broker."""

    def __init__(self, bootstrap_servers: str, topic: str = kafka_client.USAGE_TOPIC) -> None:
        self._bootstrap_servers, self._topic = bootstrap_servers, topic

    async def batches(self) -> AsyncIterator[Sequence[bytes]]:
        """Yield what lies between the log's beginning and its end as it is now."""
        consumer = kafka_client.consumer(self._bootstrap_servers, "headrace-reconcile")
        try:
            async with asyncio.timeout(_BROKER_TIMEOUT_S):
                await consumer.start()
                await consumer.topics()
                numbers = consumer.partitions_for_topic(self._topic) or set()
                partitions = [TopicPartition(self._topic, it) for it in sorted(numbers)]
                consumer.assign(partitions)
                begins = await consumer.beginning_offsets(partitions)
            for partition, begin in begins.items():
                consumer.seek(partition, begin)
            async for values in _until_end(consumer, partitions):
                yield values
        finally:
            await kafka_client.stop(consumer)


async def _until_end(
    consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition]
) -> AsyncIterator[Sequence[bytes]]:
    """Read to where each partition's first fetch says that it ends.

    What brokers say elsewhere of ends may be too low, and silence says nothing.

    Raises:
        TimeoutError: the broker answers no more.
    """
    ends: dict[TopicPartition, int] = {}
    unread, num_idle = set(partitions), 0
    while unread:
        batch = await consumer.getmany(timeout_ms=_POLL_MS, max_records=2000)
        if values := [record.value or b"" for rows in batch.values() for record in rows]:
            yield values
        for partition in unread - ends.keys():
            if (end := consumer.highwater(partition)) is not None:
                ends[partition] = end
        left = {it for it in unread if it not in ends or await consumer.position(it) < ends[it]}
        num_idle = 0 if values or left < unread else num_idle + 1
        if num_idle > _MAX_IDLE:
            raise TimeoutError("the broker does not tell the log's end")
        unread = left


async def reconcile(desk: Desk, log: LogReader) -> pb.ReconcileResponse:
    """Compare everything; `ok` says that nothing is lost."""
    answer = pb.ReconcileResponse()
    try:
        await _compare_log(desk, log, answer)
        answer.log_was_read = True
    except (KafkaError, OSError, TimeoutError) as error:
        _log.warning("the log cannot be read: %s", error)
        answer.problems.append("Note: the log could not be read; only the workers' counts were.")
    await _compare_witnesses(desk, answer)
    del answer.problems[MAX_PROBLEMS:]
    answer.ok = answer.num_log_missing == answer.num_witness_missing == 0
    return answer


async def _compare_log(desk: Desk, log: LogReader, answer: pb.ReconcileResponse) -> None:
    seen: set[EventKey] = set()
    missing: list[EventKey] = []
    async for values in log.batches():
        answer.num_log_messages += len(values)
        events = [event for value in values if (event := parse(UsageEvent, value)) is not None]
        new = {(it.request_id, int(it.kind)) for it in events} - seen
        seen |= new
        missing += await _missing(desk, sorted(new))
    if missing:
        await asyncio.sleep(_PATIENCE_S)
        missing = await _missing(desk, missing)
    answer.num_log_events, answer.num_log_missing = len(seen), len(missing)
    answer.problems.extend(
        f"Event {request_id}/{kind} is in the log and not in the books."
        for request_id, kind in missing[:MAX_PROBLEMS]
    )


async def _missing(desk: Desk, keys: Sequence[EventKey]) -> list[EventKey]:
    # Events without an id are among the dead letters by their bytes.
    ids = [
        pb.EventId(request_id=request_id, kind=UsageEvent.Kind.ValueType(kind))
        for request_id, kind in keys
        if request_id
    ]
    found = await desk.read(lambda it: find_missing(it, ids))
    return [(it.request_id, int(it.kind)) for it in found]


async def _compare_witnesses(desk: Desk, answer: pb.ReconcileResponse) -> None:
    low = ""
    while True:
        piece, low = await desk.read(partial(_witnesses, after=low))
        if not piece:
            return
        booked = await desk.read(partial(_booked, ids=list(piece)))
        for request_id, witnesses in piece.items():
            answer.num_witnessed += 1
            _compare_one(request_id, witnesses, booked.get(request_id), answer)


def _compare_one(
    request_id: str,
    witnesses: Sequence[WorkerUsage],
    events: Sequence[UsageEvent] | None,
    answer: pb.ReconcileResponse,
) -> None:
    if events is None:
        answer.num_witness_missing += 1
        answer.problems.append(f"Request {request_id} was worked on and is not in the books.")
        return
    closes = {it.request_id: it for it in events if it.kind == CLOSED}
    closed = closes.get(correction_ids(request_id)[0], closes.get(request_id))
    best = best_witness(witnesses)
    if closed is None or best is None or closed.usage.output_tokens == best.output_tokens:
        return
    answer.num_witness_differs += 1
    answer.problems.append(
        f"Note: request {request_id} is booked with {closed.usage.output_tokens} output tokens, "
        f"the workers counted {best.output_tokens}."
    )


def _witnesses(connection: Connection, after: str) -> tuple[dict[str, list[WorkerUsage]], str]:
    """Return the workers' counts of the next requests, all of each, and the last id among them."""
    table, found = schema.worker_usage, dict[str, list[WorkerUsage]]()
    told = table.c.request_id
    next_ids = select(told).where(told > after).distinct().order_by(told).limit(_PIECE_REQUESTS)
    wanted = list(connection.execute(next_ids).scalars())
    if not wanted:
        return found, after
    # The rest of a request whose prompts the piece's end parts.
    rest = told.startswith(jobs_prefix(request_of(wanted[-1])), autoescape=True)
    query = select(told, table.c.payload).where(or_(told.in_(wanted), rest)).order_by(told)
    last = after
    for row in connection.execute(query):
        last = row.request_id
        usage = WorkerUsage.FromString(row.payload)
        found.setdefault(request_of(last), []).append(usage)
    return found, last


def _booked(connection: Connection, ids: Sequence[str]) -> dict[str, list[UsageEvent]]:
    """Return what is booked of each request, corrections included: those tell the whole usage."""
    table, found = schema.usage_events, dict[str, list[UsageEvent]]()
    wanted = [*ids, *(correction_ids(it)[0] for it in ids)]
    query = select(table.c.request_id, table.c.payload).where(table.c.request_id.in_(wanted))
    for row in connection.execute(query):
        found.setdefault(corrected_id(row.request_id), []).append(
            UsageEvent.FromString(row.payload)
        )
    return found
