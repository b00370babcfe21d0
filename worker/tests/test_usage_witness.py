"""Usage witness: records reach Kafka; without Kafka they wait, bounded, and drops are counted."""

import asyncio
import contextlib

import pytest
from aiokafka import TopicPartition

from headrace_common.kafka_client import WORKER_USAGE_TOPIC, consumer
from headrace_common.metrics import new_registry
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import WorkerUsage
from headrace_testing.waiting import eventually, free_port
from headrace_worker import usage_witness
from headrace_worker.metrics import WorkerMetrics
from headrace_worker.usage_witness import UsageWitness


def record(idx: int) -> WorkerUsage:
    return WorkerUsage(request_id=f"req_{idx}", usage=TokenUsage(output_tokens=idx))


@contextlib.asynccontextmanager
async def running(bootstrap):
    metrics = WorkerMetrics(new_registry())
    witness = UsageWitness(bootstrap, "w", metrics)
    task = asyncio.create_task(witness.run())
    try:
        yield witness, metrics
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def read_all(bootstrap) -> dict[str, WorkerUsage]:
    """Everything in the topic, by key."""
    reader = consumer(bootstrap, "test")
    await reader.start()
    try:
        partitions = [
            TopicPartition(WORKER_USAGE_TOPIC, idx)
            for idx in reader.partitions_for_topic(WORKER_USAGE_TOPIC) or ()
        ]
        reader.assign(partitions)
        await reader.seek_to_beginning(*partitions)
        got = await reader.getmany(timeout_ms=1000)
        return {
            message.key.decode(): WorkerUsage.FromString(message.value)
            for messages in got.values()
            for message in messages
        }
    finally:
        await reader.stop()


@pytest.mark.kafka
async def test_records_reach_the_topic_keyed_by_request(own_kafka):
    """Each record is one message under its request id."""
    bootstrap = f"127.0.0.1:{own_kafka.port}"
    async with running(bootstrap) as (witness, metrics):
        for idx in range(5):
            witness.record(record(idx))
        await witness.flush(10)
        assert witness.num_waiting == 0
        assert metrics.usage_sent._value.get() == 5
    found = await read_all(bootstrap)
    assert found == {f"req_{idx}": record(idx) for idx in range(5)}


@pytest.mark.kafka
async def test_records_wait_for_a_broker_that_comes_back(own_kafka):
    """A broker that is down at first costs nothing but time."""
    own_kafka.kill()
    async with running(f"127.0.0.1:{own_kafka.port}") as (witness, metrics):
        witness.record(record(1))
        await asyncio.sleep(0.3)
        assert witness.num_waiting == 1
        own_kafka.start()
        await eventually(lambda: witness.num_waiting == 0, within_s=20)
        assert metrics.usage_dropped._value.get() == 0


async def test_without_kafka_the_oldest_are_dropped_and_counted(monkeypatch):
    """Recording never blocks; memory is bounded."""
    monkeypatch.setattr(usage_witness, "MAX_WAITING", 3)
    async with running(f"127.0.0.1:{free_port()}") as (witness, metrics):
        for idx in range(5):
            witness.record(record(idx))
        assert witness.num_waiting == 3
        assert metrics.usage_dropped._value.get() == 2
        await witness.flush(0.05)
        assert metrics.usage_dropped._value.get() == 5
