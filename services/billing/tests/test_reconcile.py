"""What the workers counted is looked up in the books."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from prometheus_client import CollectorRegistry

from headrace_billing import reconcile as module
from headrace_billing.bookkeeper import Bookkeeper
from headrace_billing.books_service import BooksService
from headrace_billing.changes import ChangeFeed
from headrace_billing.deliveries import Delivery
from headrace_billing.desk import Desk
from headrace_billing.metrics import BillingMetrics
from headrace_billing.reconcile import LogReader, reconcile
from headrace_billing.store import Database
from headrace_common import kafka_client
from headrace_common.clock import SystemClock
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import ENDING_SWEPT, UsageEvent, WorkerUsage
from headrace_testing.clock import FakeClock
from headrace_testing.servers import LocalServer
from headrace_testing.usage_events import closed, opened, witnessed


class EmptyLog:
    """A log that was trimmed."""

    async def batches(self) -> AsyncIterator[Sequence[bytes]]:
        """Yield nothing."""
        for values in ():
            yield values


async def book(database: Database, *messages: UsageEvent | WorkerUsage) -> None:
    batch = [
        Delivery(
            "usage" if isinstance(it, UsageEvent) else "workers", 0, idx, it.SerializeToString()
        )
        for idx, it in enumerate(messages)
    ]
    await database.write(lambda it: Bookkeeper("workers").book_batch(it, batch, 1))


@pytest.mark.parametrize("piece", [1, 2, 1000])
async def test_prompts_of_one_request_are_looked_up_together(
    database: Database, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Their counts are summed, however many are read at once; work nobody booked is found."""
    desk = Desk(database, ChangeFeed(database), SystemClock(), kept_days=1)
    monkeypatch.setattr(module, "_PIECE_REQUESTS", piece)
    few = TokenUsage(prompt_tokens=10, output_tokens=5)
    both = TokenUsage(prompt_tokens=20, output_tokens=10)
    for number in (1, 2):
        request_id = f"req_{number}"
        await book(database, opened(request_id), closed(request_id, usage=both))
        await book(database, *(witnessed(f"{request_id}#{idx}", usage=few) for idx in (0, 1)))
    right = await reconcile(desk, EmptyLog())
    assert (right.ok, right.num_witnessed, list(right.problems)) == (True, 2, [])
    await book(database, witnessed("req_3#1"), witnessed("req_2#2", usage=few))
    wrong = await reconcile(desk, EmptyLog())
    assert (wrong.ok, wrong.num_witness_missing, wrong.num_witness_differs) == (False, 1, 1)


async def test_a_corrected_request_is_compared_by_its_correction(database: Database) -> None:
    """It was closed for its gateway by what a worker had told so far; both told the rest later."""
    desk = Desk(database, ChangeFeed(database), SystemClock(), kept_days=1)
    begun = TokenUsage(prompt_tokens=10, output_tokens=5)
    whole = TokenUsage(prompt_tokens=10, output_tokens=9)
    await book(database, opened("req_1"), witnessed("req_1#0", usage=begun))
    await book(database, closed("req_1", usage=TokenUsage(), ending=ENDING_SWEPT))
    await book(database, witnessed("req_1#0", usage=whole))
    swept = await reconcile(desk, EmptyLog())
    assert swept.num_witness_differs == 1
    await book(database, closed("req_1", usage=whole))
    corrected = await reconcile(desk, EmptyLog())
    assert (corrected.ok, corrected.num_witnessed, list(corrected.problems)) == (True, 1, [])
    fuller = TokenUsage(prompt_tokens=10, output_tokens=11)
    await book(database, witnessed("req_1#0", usage=fuller))
    wrong = await reconcile(desk, EmptyLog())
    assert wrong.num_witness_differs == 1
    assert "booked with 9 output tokens" in wrong.problems[0]


class AbsentLog:
    """A log that nobody serves."""

    async def batches(self) -> AsyncIterator[Sequence[bytes]]:
        """Yield one batch and fail."""
        yield [b""]
        raise OSError("away")


async def test_what_was_found_is_a_metric(database: Database) -> None:
    """An alert needs it; of a log that could not be read the last finding stands."""
    registry, clock = CollectorRegistry(), FakeClock()
    desk = Desk(database, ChangeFeed(database), clock, kept_days=1)
    metrics = BillingMetrics(registry)

    async def found(log: LogReader) -> list[float | None]:
        books = BooksService(desk, log, metrics, clock)
        await books.Reconcile(pb.ReconcileRequest(), None)
        missing = "headrace_billing_reconcile_missing"
        return [
            registry.get_sample_value(missing, {"of": "log"}),
            registry.get_sample_value(missing, {"of": "workers"}),
            registry.get_sample_value("headrace_billing_reconcile_differing_requests"),
            registry.get_sample_value("headrace_billing_reconciled_timestamp_seconds"),
        ]

    await book(database, witnessed("req_3"))
    assert await found(AbsentLog()) == [0, 1, 0, 0]
    assert await found(EmptyLog()) == [0, 1, 0, clock.unix_s()]
    read_s = clock.unix_s()
    clock.advance(60)
    assert await found(AbsentLog()) == [0, 1, 0, read_s]


async def test_a_slow_broker_is_not_taken_for_an_empty_log(
    own_kafka: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence is no end: everything is read once it answers, and if it does not, that is said."""
    bootstrap = f"127.0.0.1:{own_kafka.port}"
    await kafka_client.ensure_topics(bootstrap, ["log"])
    kafka = kafka_client.producer(bootstrap, "test")
    await kafka.start()
    for number in range(30):
        await kafka.send_and_wait("log", b"%d" % number)
    await kafka.stop()
    assign, seek = AIOKafkaConsumer.assign, AIOKafkaConsumer.seek
    thaws_after_s = [3.0]

    def assign_paused(consumer: AIOKafkaConsumer, partitions: list[TopicPartition]) -> None:
        # A consumer fetches from then on, also before it is told where to begin.
        assign(consumer, partitions)
        consumer.pause(*partitions)

    def seek_in_vain(consumer: AIOKafkaConsumer, partition: TopicPartition, offset: int) -> None:
        own_kafka.freeze()
        # All its threads, before the first fetch.
        time.sleep(0.05)
        if thaws_after_s:
            asyncio.get_running_loop().call_later(thaws_after_s.pop(), own_kafka.thaw)
        consumer.resume(partition)
        seek(consumer, partition, offset)

    monkeypatch.setattr(AIOKafkaConsumer, "assign", assign_paused)
    monkeypatch.setattr(AIOKafkaConsumer, "seek", seek_in_vain)
    batches = module.KafkaLog(bootstrap, "log").batches()
    assert len([value async for batch in batches for value in batch]) == 30
    monkeypatch.setattr(module, "_MAX_IDLE", 4)
    try:
        with pytest.raises(TimeoutError):
            await anext(module.KafkaLog(bootstrap, "log").batches())
    finally:
        own_kafka.thaw()
