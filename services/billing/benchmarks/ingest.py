"""How fast the ledger books, against plain single-row inserts into the same kind of database.

``python services/billing/benchmarks/ingest.py [--requests 20000] [--url URL]``

Both write to SQLite in WAL mode with synchronous FULL (or to the database of --url). Prints one
JSON object: events per second of the whole booking path (parse, price, dedupe, entry, postings,
balances, daily sums, log position, commit) in batches as the consumer reads them, rows per second
of a plain insert with a commit each, and their ratio; the CPU time an event takes, which tells more
than the rate where other work shares the machine; then how fast a second delivery of everything is
absorbed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import insert

from headrace_billing import schema
from headrace_billing.audit import Stamp
from headrace_billing.bookkeeper import Bookkeeper
from headrace_billing.consumer import MAX_BATCH_MESSAGES
from headrace_billing.deliveries import Delivery
from headrace_billing.price_file import PACKAGED, load_prices
from headrace_billing.price_store import seed_prices
from headrace_billing.store import Database
from headrace_billing.verify import verify
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import ENDING_COMPLETED, UsageEvent

_START_UNIX_US = 1_800_000_000_000_000
_NUM_TENANTS, _NUM_KEYS = 20, 200
_MODEL = "smollm2-135m-instruct"


def events(num_requests: int) -> list[bytes]:
    """Return an OPENED and a CLOSED of each request, as they would come: closes a little later."""
    made: list[bytes] = []
    for number in range(num_requests + 50):
        if number < num_requests:
            made.append(_event(number, UsageEvent.KIND_OPENED).SerializeToString())
        if number >= 50:
            made.append(_event(number - 50, UsageEvent.KIND_CLOSED).SerializeToString())
    return made


def _event(number: int, kind: UsageEvent.Kind.ValueType) -> UsageEvent:
    admitted = _START_UNIX_US + number * 1000
    event = UsageEvent(
        kind=kind,
        request_id=f"req_{number:026d}",
        tenant_id=f"tenant-{number % _NUM_TENANTS}",
        project_id="default",
        key_id=f"key_{number % _NUM_KEYS:016x}",
        model=_MODEL,
        price_version=1,
        occurred_unix_us=admitted,
        admitted_unix_us=admitted,
        deadline_unix_us=admitted + 600_000_000,
    )
    if kind == UsageEvent.KIND_CLOSED:
        prompt, output = 100 + number % 900, 1 + number % 200
        cached = prompt // 2
        event.usage.CopyFrom(
            TokenUsage(prompt_tokens=prompt, cached_gpu_tokens=cached, output_tokens=output)
        )
        event.ending = ENDING_COMPLETED
        event.amount_nano_usd = (prompt - cached) * 20 + cached * 2 + output * 60
        event.duration_s = 2.0
    return event


async def book(database: Database, payloads: Sequence[bytes]) -> float:
    """Book everything in batches; return seconds."""
    keeper, started_s = Bookkeeper("usage.worker.v1"), time.perf_counter()
    for low in range(0, len(payloads), MAX_BATCH_MESSAGES):
        batch = [
            Delivery("usage.v1", 0, offset, value, 1_800_000_000_000)
            for offset, value in enumerate(payloads[low : low + MAX_BATCH_MESSAGES], start=low)
        ]
        await database.write(lambda it, rows=batch: keeper.book_batch(it, rows, 1_800_000_000))  # type: ignore[misc]  # mypy loses the default
    return time.perf_counter() - started_s


async def insert_singly(database: Database, num_rows: int) -> float:
    """Insert rows one by one, a commit each; return seconds."""
    started_s = time.perf_counter()
    for number in range(num_rows):
        row = {
            "request_id": f"single_{number}",
            "worker_id": "w",
            "incarnation": 1,
            "payload": b"x" * 100,
        }
        await database.write(lambda it, one=row: it.execute(insert(schema.worker_usage), one))  # type: ignore[misc]  # as above
    return time.perf_counter() - started_s


async def measure(url: str, num_requests: int, num_single: int) -> dict[str, float | bool]:
    """Run everything on one database."""
    database = Database(url)
    await database.migrate()
    by = Stamp(1_700_000_000)
    await database.write(lambda it: seed_prices(it, load_prices(PACKAGED), by))
    payloads = events(num_requests)
    single_s = await insert_singly(database, num_single)
    cpu_before_s = time.process_time()
    booked_s = await book(database, payloads)
    cpu_s = time.process_time() - cpu_before_s
    again_s = await book(database, payloads)
    found = await database.read(verify)
    await database.close()
    booked_per_s, single_per_s = len(payloads) / booked_s, num_single / single_s
    return {
        "events": len(payloads),
        "booked_events_per_s": round(booked_per_s),
        "booked_cpu_us_per_event": round(cpu_s / len(payloads) * 1e6, 1),
        "single_inserts_per_s": round(single_per_s),
        "ratio": round(booked_per_s / single_per_s, 1),
        "repeated_events_per_s": round(len(payloads) / again_s),
        "books_are_right": found.ok and found.num_entries == num_requests,
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--single", type=int, default=500)
    parser.add_argument("--url", default="", help="SQLAlchemy URL of an empty database")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = options.url or f"sqlite:///{Path(folder) / 'ledger.db'}"
        found = asyncio.run(measure(url, options.requests, options.single))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
