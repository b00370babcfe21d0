"""From a real broker into the books: each event once, whatever happens on the way."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from secrets import token_hex

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection, func, select, text

from headrace_billing import schema
from headrace_billing.consumer import UsageConsumer
from headrace_billing.metrics import BillingMetrics
from headrace_billing.store import Database
from headrace_billing.verify import verify
from headrace_common import kafka_client
from headrace_common.clock import SystemClock
from headrace_common.errors import Unavailable
from headrace_common.lifecycle import cancel_and_wait, supervise
from headrace_contracts.billing.v1.billing_pb2 import VerifyResponse
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import ENDING_SWEPT, UsageEvent
from headrace_testing.servers import LocalServer
from headrace_testing.usage_events import AMOUNT_NANO_USD, closed, opened, witnessed
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.kafka
BATCH_FAILURES = 3


class Scene:
    """Topics of one test, and a consumer of them."""

    def __init__(self, bootstrap: str, database: Database) -> None:
        self.bootstrap, self.database = bootstrap, database
        name = token_hex(4)
        self.usage_topic, self.worker_topic = f"usage-{name}", f"workers-{name}"
        self.registry = CollectorRegistry()
        self.consumer = UsageConsumer(
            bootstrap,
            database,
            SystemClock(),
            BillingMetrics(self.registry),
            topics=(self.worker_topic, self.usage_topic),
        )
        self.failed = asyncio.Event()

    async def send(self, values: Sequence[bytes], topic: str = "", key: bytes = b"acme") -> None:
        topics = [self.usage_topic, self.worker_topic]
        await kafka_client.ensure_topics(self.bootstrap, topics)
        producer = kafka_client.producer(self.bootstrap, "test")
        await producer.start()
        try:
            for value in values:
                await producer.send(topic or self.usage_topic, value, key=key)
            await producer.flush()
        finally:
            await producer.stop()

    @contextlib.asynccontextmanager
    async def consuming(self) -> AsyncIterator[None]:
        consuming = supervise(
            "consumer", self.consumer.run, max_delay_s=0.5, on_failure=self.failed.set
        )
        task = asyncio.create_task(consuming)
        yield
        await cancel_and_wait(task)
        await self.consumer.release()

    async def books(self) -> VerifyResponse:
        return await self.database.read(verify)

    async def booked(self, num_events: int) -> VerifyResponse:
        async def probe() -> VerifyResponse | None:
            found = await self.books()
            return found if found.num_events == num_events else None

        found = await eventually(probe, within_s=40, every_s=0.1)
        assert found is not None
        assert found.ok, found.problems
        return found

    def metric(self, name: str) -> float:
        value = self.registry.get_sample_value(f"headrace_billing_{name}")
        assert value is not None
        return value


@pytest.fixture
def scene(kafka_bootstrap: str, database: Database) -> Scene:
    return Scene(kafka_bootstrap, database)


def lives(low: int, high: int) -> list[bytes]:
    """OPENED and CLOSED of some requests."""
    return [
        make(f"req_{i:05d}").SerializeToString()
        for i in range(low, high)
        for make in (opened, closed)
    ]


async def test_events_are_booked_once_however_often_they_are_in_the_log(scene: Scene) -> None:
    """The outbox delivers at least once; the ledger books once."""
    await scene.send(lives(0, 50) + lives(20, 60) + lives(0, 10))
    async with scene.consuming():
        found = await scene.booked(120)
        assert (found.num_entries, found.num_open) == (60, 0)
        await eventually(lambda: scene.metric("duplicate_events_total") == 80)
        await eventually(lambda: scene.metric("consumer_lag_messages") == 0)
        await eventually(lambda: scene.consumer.caught_up_for_s() > 0)
        await scene.send(lives(100, 101), key=b"another tenant, another partition")
        await scene.booked(122)


async def test_a_new_consumer_goes_on_where_the_books_stand(scene: Scene) -> None:
    """Nothing is read twice after an orderly end."""
    await scene.send(lives(0, 20))
    async with scene.consuming():
        await scene.booked(40)
    await scene.send(lives(20, 30))
    async with scene.consuming():
        await scene.booked(60)
    assert scene.metric("duplicate_events_total") == 0
    assert scene.metric("log_restarts_total") == 0


async def test_poison_is_put_aside_and_the_log_goes_on(scene: Scene) -> None:
    """Unparsable bytes, senseless counts, a tombstone."""
    senseless = closed("req_bad", usage=TokenUsage(prompt_tokens=1, cached_gpu_tokens=9))
    poison = [b"\xff\xff not a message", senseless.SerializeToString(), b""]
    await scene.send([*lives(0, 1), *poison, *lives(1, 2)])
    async with scene.consuming():
        found = await scene.booked(4)
        assert found.num_dead_letters == 3
    async with scene.consuming():
        await scene.send(lives(2, 3))
        assert (await scene.booked(6)).num_dead_letters == 3


async def test_what_the_database_refuses_is_put_aside_alone(scene: Scene) -> None:
    """One message must not stop all tenants' billing, whatever the reason."""

    def refuse(connection: Connection) -> None:
        if connection.dialect.name == "sqlite":
            connection.execute(
                text(
                    "CREATE TRIGGER refuse BEFORE INSERT ON usage_events "
                    "WHEN NEW.request_id = 'req_00001' BEGIN SELECT RAISE(ABORT, 'no'); END"
                )
            )
        else:
            connection.execute(
                text("ALTER TABLE usage_events ADD CHECK (request_id <> 'req_00001')")
            )

    await scene.database.write(refuse)
    await scene.send(lives(0, 4))
    async with scene.consuming():
        found = await scene.booked(6)
        await eventually(lambda: scene.metric("dead_letters_total") == 2)
        found = await scene.books()
        assert (found.num_dead_letters, found.num_entries) == (2, 3)


async def test_a_workers_count_is_there_for_a_swept_close(scene: Scene) -> None:
    """Both topics are read; the witness comes first in a batch."""
    await scene.send([witnessed().SerializeToString()], scene.worker_topic)
    swept = closed(ending=ENDING_SWEPT, usage=TokenUsage(), amount_nano_usd=0)
    await scene.send([opened().SerializeToString(), swept.SerializeToString()])
    async with scene.consuming():
        await scene.booked(2)
    query = select(schema.entries.c.amount_nano_usd)
    assert await scene.database.read(lambda it: it.execute(query).scalar()) == AMOUNT_NANO_USD


async def test_a_database_that_is_away_loses_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is tried again until it is booked, also if only the answer was lost."""
    real, left = scene.database.write, BATCH_FAILURES

    async def failing(work: Callable[[Connection], object]) -> object:
        nonlocal left
        # Taking and renewing shares is not a batch; it is tried again by the consumer's supervisor.
        if left and work.__qualname__.startswith("UsageConsumer._book"):
            left -= 1
            if left == 0:
                await real(work)
            raise Unavailable("away")
        return await real(work)

    monkeypatch.setattr(scene.database, "write", failing)
    await scene.send(lives(0, 10))
    async with scene.consuming():
        await scene.booked(20)
        await eventually(lambda: scene.metric("duplicate_events_total") == 20)
    failures = scene.registry.get_sample_value(
        "headrace_billing_failures_total", {"part": "database"}
    )
    assert failures == BATCH_FAILURES


async def test_a_killed_consumer_neither_loses_nor_repeats(scene: Scene, database_url: str) -> None:
    """SIGKILL at any moment, before and after commits, with duplicates in the log."""
    values = lives(0, 400)
    await scene.send(values + values[100:300])
    program = str(Path(__file__).with_name("consume.py"))
    arguments = [database_url, scene.bootstrap, scene.usage_topic, scene.worker_topic]
    count = select(func.count()).select_from(schema.usage_events)

    async def num_booked() -> int:
        return await scene.database.read(lambda it: it.execute(count).scalar_one())

    for kills in range(4):
        before = await num_booked()

        async def progressed(before: int = before) -> bool:
            return await num_booked() > before

        process = await asyncio.create_subprocess_exec(sys.executable, program, *arguments)
        try:
            await eventually(progressed, within_s=40, every_s=0.005)
        finally:
            process.kill()
            await process.wait()
        await scene.send(lives(400 + kills * 100, 500 + kills * 100))
    async with scene.consuming():
        found = await scene.booked(2 * 800)
    assert (found.num_entries, found.num_open, found.postings_sum_nano_usd) == (800, 0, 0)


async def test_a_broker_that_comes_back_empty_is_read_from_its_beginning(
    own_kafka: LocalServer, database: Database
) -> None:
    """Also if its new log is already longer than the old one was."""
    scene = Scene(f"127.0.0.1:{own_kafka.port}", database)
    await scene.send(lives(0, 10))
    async with scene.consuming():
        await scene.booked(20)
        own_kafka.kill()
        own_kafka.start()
        await scene.send(lives(5, 40))
        found = await scene.booked(80)
        assert found.num_entries == 40
        await eventually(lambda: scene.consumer.caught_up_for_s() > 0)
        own_kafka.kill()
        await eventually(lambda: scene.consumer.caught_up_for_s() == 0, within_s=15)
        own_kafka.start()
        await scene.send(lives(40, 41))
        await scene.booked(82)
    assert scene.metric("log_restarts_total") >= 2


async def test_a_broker_that_is_replaced_while_a_batch_waits_is_noticed(
    own_kafka: LocalServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reconnects silently and the new log is longer than the place in the old one."""
    scene = Scene(f"127.0.0.1:{own_kafka.port}", database)
    real, is_open, waiting = database.write, asyncio.Event(), asyncio.Event()
    is_open.set()

    async def gated(work: Callable[[Connection], object]) -> object:
        if not is_open.is_set():
            waiting.set()
        await is_open.wait()
        return await real(work)

    monkeypatch.setattr(database, "write", gated)
    await scene.send(lives(0, 10))
    async with scene.consuming():
        await scene.booked(20)
        is_open.clear()
        await scene.send(lives(10, 11))
        await asyncio.wait_for(waiting.wait(), 20)
        own_kafka.kill()
        own_kafka.start()
        await scene.send(lives(5, 40))
        is_open.set()
        await scene.booked(80)


async def test_a_log_that_began_anew_while_nobody_read_is_noticed(
    own_kafka: LocalServer, database: Database
) -> None:
    """The message before the stored place is another one, or there is none."""
    scene = Scene(f"127.0.0.1:{own_kafka.port}", database)
    await scene.send(lives(0, 10))
    async with scene.consuming():
        await scene.booked(20)
    for low, high, total in ((100, 110, 40), (200, 203, 46)):
        own_kafka.kill()
        own_kafka.start()
        await scene.send(lives(low, high))
        async with scene.consuming():
            await scene.booked(total)
    assert scene.metric("log_restarts_total") == 2


async def test_an_absent_broker_is_waited_for(own_kafka: LocalServer, database: Database) -> None:
    """And the lag is not called zero meanwhile."""
    scene = Scene(f"127.0.0.1:{own_kafka.port}", database)
    own_kafka.kill()
    async with scene.consuming():
        await asyncio.wait_for(scene.failed.wait(), 20)
        assert scene.metric("consumer_lag_messages") != 0
        assert scene.consumer.caught_up_for_s() == 0
        own_kafka.start()
        await scene.send(lives(0, 5))
        await scene.booked(10)
        await eventually(lambda: scene.consumer.caught_up_for_s() > 0)
        own_kafka.kill()
        await eventually(lambda: scene.consumer.caught_up_for_s() == 0, within_s=15)


def test_the_last_kind_of_event_is_known() -> None:
    """A kind added to the contract needs a booking rule first."""
    assert UsageEvent.Kind.keys() == ["KIND_UNSPECIFIED", "KIND_OPENED", "KIND_CLOSED"]


async def test_two_consumers_share_the_partitions_and_one_takes_over(scene: Scene) -> None:
    """Each event is booked once, whoever reads it, also when one of them vanishes."""
    other = UsageConsumer(
        scene.bootstrap,
        scene.database,
        SystemClock(),
        BillingMetrics(CollectorRegistry()),
        topics=(scene.worker_topic, scene.usage_topic),
    )
    for i in range(30):
        await scene.send(lives(10 * i, 10 * i + 10), key=f"tenant {i}".encode())
    task = asyncio.create_task(supervise("other", other.run, max_delay_s=0.5))
    async with scene.consuming():
        await eventually(
            lambda: len(other.shares.epochs) == len(scene.consumer.shares.epochs) == 12,
            within_s=30,
        )
        await scene.booked(600)
        # It vanishes without a word: its partitions are free when its lease ends.
        await cancel_and_wait(task)
        for i in range(30, 40):
            await scene.send(lives(10 * i, 10 * i + 10), key=f"tenant {i}".encode())
        await scene.booked(800)
        await eventually(lambda: len(scene.consumer.shares.epochs) == 24, within_s=30)
