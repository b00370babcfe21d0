"""Tests of the relay against a real broker that is stopped, killed and emptied."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_common.kafka_client import NUM_PARTITIONS, USAGE_TOPIC, consumer, ensure_topics
from headrace_common.lifecycle import cancel_and_wait, supervise
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_gateway.outbox import Outbox
from headrace_gateway.outbox_metrics import OutboxMetrics
from headrace_gateway.relay import BillingLedger, KafkaSink, Relay
from headrace_gateway.usage_log import OutboxUsageLog
from headrace_testing.fake_billing import FakeBilling, FakeBillingServer
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.kafka


def bootstrap(broker: LocalServer) -> str:
    return f"127.0.0.1:{broker.port}"


@contextlib.asynccontextmanager
async def booking(broker: LocalServer, billing: FakeBilling) -> AsyncIterator[None]:
    """Book everything that the topic holds, as billing does: all partitions, from the start."""

    async def body() -> None:
        await ensure_topics(bootstrap(broker), [USAGE_TOPIC])
        reader = consumer(bootstrap(broker), "test")
        try:
            await reader.start()
            reader.assign([TopicPartition(USAGE_TOPIC, p) for p in range(NUM_PARTITIONS)])
            while True:
                for records in (await reader.getmany(timeout_ms=200)).values():
                    for record in records:
                        billing.book(UsageEvent.FromString(record.value))
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await reader.stop()

    task = asyncio.create_task(supervise("booking", body, max_delay_s=0.3))
    try:
        yield
    finally:
        await cancel_and_wait(task)


def event(kind: UsageEvent.Kind.ValueType, number: int) -> UsageEvent:
    return UsageEvent(
        kind=kind,
        request_id=f"req_{number}",
        tenant_id=f"tenant-{number % 3}",
        key_id="key_1",
        model="smollm2-135m-instruct",
        occurred_unix_us=1_000_000,
        deadline_unix_us=2_000_000,
    )


@contextlib.asynccontextmanager
async def usage_log(
    folder: Path, broker: LocalServer, billing: str
) -> AsyncIterator[OutboxUsageLog]:
    clock, metrics = SystemClock(), OutboxMetrics(CollectorRegistry())
    outbox = Outbox(folder, clock, metrics, segment_age_s=0.2)
    sink = KafkaSink(bootstrap(broker), "test")
    relay = Relay(
        outbox, sink, BillingLedger(billing), clock, metrics, grace_s=1.5, confirm_interval_s=0.3
    )
    log = OutboxUsageLog(outbox, relay, clock, metrics)
    await log.start()
    try:
        yield log
    finally:
        await log.close()


async def use(log: OutboxUsageLog, numbers: range) -> None:
    for number in numbers:
        async with asyncio.timeout(10):
            log.opened(event(UsageEvent.KIND_OPENED, number))
            await log.closed(event(UsageEvent.KIND_CLOSED, number))


def num_closed(billing: FakeBilling) -> int:
    return sum(kind == UsageEvent.KIND_CLOSED for _, kind in billing._bookings)


async def test_each_event_arrives_though_the_broker_freezes_and_restarts_empty(
    tmp_path: Path, own_kafka: LocalServer
) -> None:
    """Requests are never held up, and the books are complete in the end."""
    billing, broker = FakeBilling(), own_kafka
    async with (
        FakeBillingServer(billing) as server,
        booking(broker, billing),
        usage_log(tmp_path, broker, server.address) as log,
    ):
        await use(log, range(10))
        await eventually(lambda: num_closed(billing) == 10, within_s=20)
        broker.freeze()
        await use(log, range(10, 20))
        await asyncio.sleep(1)
        broker.thaw()
        await eventually(lambda: num_closed(billing) == 20, within_s=30)
        broker.kill()
        await use(log, range(20, 30))
        broker.start()
        await eventually(lambda: num_closed(billing) == 30, within_s=40)
        await eventually(lambda: not list(tmp_path.glob("*.seg"))[1:], within_s=20)


async def test_events_acknowledged_by_a_broker_that_then_lost_them_are_booked(
    tmp_path: Path, own_kafka: LocalServer
) -> None:
    """Nobody reads while the broker lives: its death takes the only other copy."""
    billing, broker = FakeBilling(), own_kafka
    async with (
        FakeBillingServer(billing) as server,
        usage_log(tmp_path, broker, server.address) as log,
    ):
        await use(log, range(15))
        await eventually((tmp_path / "position").exists, within_s=20)
        await eventually(lambda: log._relay.num_pending == 0, within_s=20)
        broker.kill()
        broker.start()
        async with booking(broker, billing):
            await eventually(lambda: num_closed(billing) == 15, within_s=40)
