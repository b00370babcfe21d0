"""Verify finds every way in which books can be wrong."""

import pytest
from sqlalchemy import Connection, text

from headrace_billing.bookkeeper import Bookkeeper
from headrace_billing.deliveries import Delivery
from headrace_billing.store import Database
from headrace_billing.verify import MAX_PROBLEMS, verify
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_testing.usage_events import closed, opened


async def book(database: Database, *events: UsageEvent) -> None:
    """Book events as one batch."""
    batch = [Delivery("usage", 0, idx, it.SerializeToString()) for idx, it in enumerate(events)]
    await database.write(lambda it: Bookkeeper("workers").book_batch(it, batch, 1))


def disarm(connection: Connection) -> None:
    """Take away the triggers that would prevent the damage."""
    for table in ("usage_events", "entries", "postings"):
        if connection.dialect.name == "sqlite":
            for verb in ("update", "delete"):
                connection.execute(text(f"DROP TRIGGER {table}_refuses_{verb}"))
        else:
            connection.execute(text(f"DROP TRIGGER {table}_refuses_change ON {table}"))


async def test_right_books_have_no_problems(database: Database) -> None:
    """Open and closed requests of several tenants, more than one piece of the recount."""
    events = [make(f"req_{i:04d}") for i in range(1200) for make in (opened, closed)]
    await book(database, *events, opened("req_open"))
    found = await database.read(verify)
    assert found.ok, found.problems
    assert (found.num_events, found.num_entries, found.num_open) == (2401, 1200, 1)
    assert list(found.problems) == []


async def test_empty_books_are_right(database: Database) -> None:
    """Nothing adds up to nothing."""
    found = await database.read(verify)
    assert (found.ok, found.num_events, found.postings_sum_nano_usd) == (True, 0, 0)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("UPDATE balances SET amount_nano_usd = 1 WHERE account = 'receivable:acme'", "Balance"),
        ("DELETE FROM balances WHERE account = 'receivable:acme'", "Balance receivable:acme is 0"),
        (
            "UPDATE postings SET amount_nano_usd = 1 WHERE account = 'receivable:acme'",
            "sum to",
        ),
        ("DELETE FROM postings", "other postings"),
        ("UPDATE entries SET amount_nano_usd = 1", "Entry req_1 is 1"),
        ("DELETE FROM usage_events WHERE kind = 2", "an entry but was not closed"),
        ("DELETE FROM usage_events WHERE request_id = 'req_1'", "entries without any event"),
        ("UPDATE usage_events SET amount_nano_usd = 7 WHERE kind = 2", "says 7 nano-USD"),
        ("UPDATE daily_usage SET output_tokens = 1", "Daily usage"),
        ("DELETE FROM open_requests", "req_2 is not listed as open"),
        (
            "INSERT INTO open_requests VALUES ('req_1', 5, 'acme', 'p', 'k', 'm', 0, 0)",
            "req_1 is wrongly listed as open",
        ),
        (
            "INSERT INTO open_requests VALUES ('ghost', 5, 'acme', 'p', 'k', 'm', 0, 0)",
            "open_requests without any event",
        ),
        ("INSERT INTO entries VALUES ('ghost', 'voided', 0)", "entries without any event"),
    ],
)
async def test_damage_is_found(database: Database, damage: str, problem: str) -> None:
    """One sentence says what is wrong."""
    await book(database, opened(), closed(), opened("req_2"))

    def harm(connection: Connection) -> None:
        disarm(connection)
        connection.execute(text(damage))

    await database.write(harm)
    found = await database.read(verify)
    assert not found.ok
    assert any(problem in it for it in found.problems), found.problems


async def test_a_flood_of_problems_is_cut(database: Database) -> None:
    """The answer stays small however bad it is."""
    await book(database, *(closed(f"req_{i:03d}") for i in range(150)))
    await database.write(disarm)
    await database.write(lambda it: it.execute(text("UPDATE entries SET amount_nano_usd = 1")))
    found = await database.read(verify)
    assert not found.ok
    assert len(found.problems) == MAX_PROBLEMS
