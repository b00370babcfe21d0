"""Whatever order, repetition and cutting of the log: the same books."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from headrace_billing import schema
from headrace_billing.bookkeeper import Bookkeeper
from headrace_billing.deliveries import Delivery
from headrace_billing.ledger import Recount
from headrace_billing.price_store import load_price_book
from headrace_billing.store import Database
from headrace_billing.verify import verify
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_testing.postgres import LocalPostgres
from headrace_testing.usage_events import closed, opened

TENANTS = ("acme", "zeta")


@st.composite
def requests(draw: st.DrawFn, number: int) -> list[UsageEvent]:
    """One request's events; some never close, some have no tokens."""
    name, tenant = f"req_{number:02d}", draw(st.sampled_from(TENANTS))
    prompt = draw(st.integers(0, 2000))
    usage = TokenUsage(
        prompt_tokens=prompt,
        cached_gpu_tokens=draw(st.integers(0, prompt)),
        output_tokens=draw(st.integers(0, 500)),
    )
    events = [opened(name, tenant), closed(name, tenant, usage=usage, amount_nano_usd=0)]
    return draw(st.sampled_from([events, events[:1], events[1:]]))


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[UsageEvent], list[list[UsageEvent]]]:
    """The distinct events, and batches that hold each at least once, in any order."""
    count = draw(st.integers(1, 6))
    events = [event for number in range(count) for event in draw(requests(number))]
    repeated = draw(st.lists(st.sampled_from(events), max_size=10))
    shuffled = draw(st.permutations(events + repeated))
    cuts = sorted(draw(st.lists(st.integers(0, len(shuffled)), max_size=4)))
    edges = [0, *cuts, len(shuffled)]
    return events, [shuffled[low:high] for low, high in pairwise(edges)]


async def check(url: str, events: list[UsageEvent], batches: list[list[UsageEvent]]) -> None:
    """Book the batches and compare with a recount of the distinct events."""
    database, keeper = Database(url), Bookkeeper("workers")
    for batch in batches:
        deliveries = [
            Delivery("usage", 0, idx, event.SerializeToString()) for idx, event in enumerate(batch)
        ]
        await database.write(lambda it, rows=deliveries: keeper.book_batch(it, rows, 1))
    recount = Recount(await database.read(load_price_book))
    for event in events:
        recount.add(event)
    rows = await database.read(lambda it: it.execute(select(schema.balances)).all())
    found = await database.read(verify)
    await database.close()
    assert dict(rows) == recount.balances
    assert sum(amount for _, amount in rows) == 0
    assert found.ok
    assert found.num_events == len(events)
    assert found.num_entries == len(recount.entries)
    assert found.num_open == len(recount.open_requests)
    assert found.postings_sum_nano_usd == 0


@given(log=logs())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
async def test_sqlite_books_the_same_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    migrated_file: Path,
    log: tuple[list[UsageEvent], list[list[UsageEvent]]],
) -> None:
    """A replay into an empty database, in whatever order, gives equal balances."""
    folder: Path = tmp_path_factory.mktemp("books")
    shutil.copy(migrated_file, folder / "ledger.db")
    await check(f"sqlite:///{folder}/ledger.db", *log)


@given(log=logs())
@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.too_slow],
)
async def test_postgres_books_the_same_in_any_order(
    postgres_server: LocalPostgres,
    migrated_postgres_url: str,
    log: tuple[list[UsageEvent], list[list[UsageEvent]]],
) -> None:
    """As SQLite."""
    url = postgres_server.create_database(migrated_postgres_url)
    await check(url, *log)
    postgres_server.drop_database(url)
