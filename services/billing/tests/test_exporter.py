"""Closed requests reach a metering service, under names that make repeats harmless."""

import asyncio
import json
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs

import httpx
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import select

from headrace_billing import schema
from headrace_billing.bookkeeper import Bookkeeper
from headrace_billing.deliveries import Delivery
from headrace_billing.export_format import CLOUD_EVENTS_BATCH, Dialect, cloud_events
from headrace_billing.exporter import Exporter, ExportError, ExportTarget
from headrace_billing.ledger import MAX_UNIX_US
from headrace_billing.metrics import BillingMetrics
from headrace_billing.store import Database
from headrace_common.clock import SystemClock
from headrace_common.lifecycle import cancel_and_wait, supervise
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_testing.clock import FakeClock
from headrace_testing.usage_events import AMOUNT_NANO_USD, closed, opened
from headrace_testing.waiting import eventually


class Meter:
    """A receiver on a real port that counts an event by its name, as metering services do."""

    def __init__(self) -> None:
        self.amounts: dict[str, int] = {}
        self.num_posts = 0
        # Answers to give before it works; None = the connection is cut after the event was taken.
        self.failures: list[int | None] = []
        # What it will never take: answered with 400, the whole batch that it is in.
        self.refuses = "nothing"
        self.tokens: set[str] = set()
        meter = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                meter.num_posts += 1
                meter.tokens.add(self.headers.get("authorization", ""))
                failure = meter.failures.pop(0) if meter.failures else 200
                if meter.refuses.encode() in body:
                    failure = 400
                if failure in (None, 200):
                    meter.take(self.headers["content-type"], body)
                if failure is None:
                    self.connection.close()
                    return
                self.send_response(failure)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/api/v1/events"

    def take(self, content_type: str, body: bytes) -> None:
        if content_type == CLOUD_EVENTS_BATCH:
            for event in json.loads(body):
                assert (event["specversion"], event["source"]) == ("1.0", "headrace")
                self.amounts[event["id"]] = event["data"]["amount_nano_usd"]
        else:
            form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
            self.amounts[form["identifier"]] = int(form["payload[value]"])

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
async def meter() -> AsyncIterator[Meter]:
    meter = Meter()
    yield meter
    await asyncio.to_thread(meter.close)


def exporter(database: Database, meter: Meter, dialect: Dialect = Dialect.CLOUD_EVENTS) -> Exporter:
    target = ExportTarget(meter.url, dialect, "secret", "headrace")
    return Exporter(database, target, SystemClock(), BillingMetrics(CollectorRegistry()))


async def book(database: Database, *events: UsageEvent, exports: bool = True) -> None:
    batch = [Delivery("usage", 0, i, it.SerializeToString()) for i, it in enumerate(events)]
    keeper = Bookkeeper("workers", exports=exports)
    await database.write(lambda it: keeper.book_batch(it, batch, 1))


async def test_every_closed_request_is_sent_whatever_fails(
    database: Database, meter: Meter
) -> None:
    """Errors, cut connections after the event was taken, requests from before the exporter."""
    await book(database, closed("req_old"), exports=False)
    await book(database, *(closed(f"req_{i:03d}") for i in range(150)), opened("req_open"))
    meter.failures = [500, None, 429, 200, None]
    task = asyncio.create_task(
        supervise("export", exporter(database, meter).run, first_delay_s=0.01, max_delay_s=0.02)
    )
    await eventually(lambda: len(meter.amounts) == 151, within_s=20)
    query = select(schema.exports.c.request_id).where(schema.exports.c.exported_unix_s == 0)

    async def all_done() -> bool:
        return not await database.read(lambda it: it.execute(query).all())

    await eventually(all_done, within_s=20)
    await cancel_and_wait(task)
    assert set(meter.amounts.values()) == {AMOUNT_NANO_USD}
    assert "req_open" not in meter.amounts
    assert meter.num_posts > 2
    assert meter.tokens == {"Bearer secret"}


async def test_a_batch_that_is_not_taken_stays_on_the_list(
    database: Database, meter: Meter
) -> None:
    """And is sent again under the same names; 409 says that the receiver has it."""
    await book(database, closed("req_1"))
    sender = exporter(database, meter)
    async with httpx.AsyncClient() as http:
        meter.failures = [503]
        with pytest.raises(ExportError):
            await sender.send_some(http)
        meter.failures = [409]
        assert await sender.send_some(http) == 1
        assert await sender.send_some(http) == 0


async def test_stripes_meters_get_one_event_for_each_class(
    database: Database, meter: Meter
) -> None:
    """The identifier is the request's and the class's; nothing is sent for what was not used."""
    await book(database, closed("req_1"))
    async with httpx.AsyncClient() as http:
        assert await exporter(database, meter, Dialect.STRIPE).send_some(http) == 1
    assert meter.amounts == {
        "req_1.input_tokens": 60,
        "req_1.cached_input_tokens": 40,
        "req_1.output_tokens": 30,
        "req_1.amount_nano_usd": AMOUNT_NANO_USD,
    }


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_what_the_receiver_refuses_holds_up_no_other(
    database: Database, meter: Meter, clock: FakeClock, dialect: Dialect
) -> None:
    """It is set aside for an hour, and sent once the receiver has been mended."""
    await book(database, *(closed(f"r{n}") for n in range(5)))
    meter.refuses = "r2"
    registry = CollectorRegistry()
    target = ExportTarget(meter.url, dialect, "", "headrace")
    sender = Exporter(database, target, clock, BillingMetrics(registry))

    def refused() -> float | None:
        return registry.get_sample_value("headrace_billing_export_refused_requests")

    async with httpx.AsyncClient() as http:
        assert await sender.send_some(http) == 5
        assert await sender.send_some(http) == 0
        assert (len({it[:2] for it in meter.amounts}), refused()) == (4, 1)
        meter.refuses = "nothing"
        clock.advance(3601)
        assert await sender.send_some(http) == 1
        assert await sender.send_some(http) == 0
        assert (len({it[:2] for it in meter.amounts}), refused()) == (5, 0)


def test_the_last_moment_that_the_books_take_has_a_text() -> None:
    """One event must not hold up all that come behind it; times are exact to the microsecond."""
    late = closed(at_unix_us=MAX_UNIX_US)
    (event,) = json.loads(cloud_events([(late, 1)], "headrace"))
    assert event["time"] == "9999-12-31T23:59:59.999999Z"
