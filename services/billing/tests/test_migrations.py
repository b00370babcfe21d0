"""Books that were kept under the first tables go on under the newest."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, MetaData, insert, select

import headrace_billing
from headrace_billing import schema
from headrace_billing.bookkeeper import BatchResult, Bookkeeper
from headrace_billing.deliveries import Delivery
from headrace_billing.ledger import Recount
from headrace_billing.price_file import PACKAGED, load_prices
from headrace_billing.prices import PriceBook
from headrace_billing.store import Database
from headrace_billing.verify import verify
from headrace_common.price_rows import PriceRow
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import ENDING_SWEPT, UsageEvent
from headrace_testing.usage_events import AMOUNT_NANO_USD, closed, opened

NAMES_OF_A_PRICE = (
    "model",
    "tier",
    "effective_from_unix_s",
    "effective_to_unix_s",
    "input_nano_usd",
    "cached_input_nano_usd",
    "cache_write_nano_usd",
    "output_nano_usd",
)
# Two tenants; one request that is still open, one that was swept for nothing.
EVENTS = [
    opened("req_1"),
    closed("req_1"),
    closed("req_2", tenant_id="other", key_id="key_2"),
    opened("req_3"),
    closed("req_3", ending=ENDING_SWEPT, usage=TokenUsage(), amount_nano_usd=0),
    opened("req_4", tenant_id="other", key_id="key_2"),
]


def _upgrade(connection: Connection, revision: str) -> None:
    config = Config()
    folder = Path(headrace_billing.__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _keep_first_books(connection: Connection) -> None:
    """Make the tables of the first revision and fill them as its service did."""
    _upgrade(connection, "0001")
    tables = MetaData()
    tables.reflect(connection)

    def add(name: str, rows: list[dict[str, object]]) -> None:
        connection.execute(insert(tables.tables[name]), rows)

    prices = [
        {"version": 1, **{name: getattr(it, name) for name in NAMES_OF_A_PRICE}}
        for it in load_prices(PACKAGED)
    ]
    add("prices", prices)
    recount = Recount(PriceBook(PriceRow(**row) for row in prices))
    bookings = [recount.add(event) for event in EVENTS]
    add(
        "usage_events",
        [
            {
                "request_id": it.event.request_id,
                "kind": it.event.kind,
                "tenant_id": it.event.tenant_id,
                "key_id": it.event.key_id,
                "source": "sweeper" if it.event.ending == ENDING_SWEPT else "log",
                "amount_nano_usd": it.amount_nano_usd,
                "payload": it.event.SerializeToString(),
            }
            for it in bookings
        ],
    )
    entries = recount.entries.values()
    add("entries", [{**_named(it), "kind": it.kind} for it in entries])
    add("postings", [{**it._asdict(), "request_id": e.request_id} for e in entries for it in e[2]])
    add("balances", [{"account": k, "amount_nano_usd": v} for k, v in recount.balances.items()])
    add("open_requests", [{"request_id": "req_4", "deadline_unix_us": 1}])


def _named(entry: object) -> dict[str, object]:
    return {name: getattr(entry, name) for name in ("request_id", "amount_nano_usd")}


async def test_books_of_the_first_revision_are_right_after_the_migration(
    empty_database_url: str,
) -> None:
    """Every event, entry, posting and balance; what is derived is filled in."""
    database = Database(empty_database_url)
    await database.write(_keep_first_books)
    await database.migrate()
    found = await database.read(verify)
    assert list(found.problems) == []
    assert found.ok
    assert (found.num_events, found.num_entries, found.num_open) == (len(EVENTS), 3, 1)
    sums = await database.read(lambda it: it.execute(select(schema.daily_usage)).all())
    assert sorted((row.tenant_id, row.num_requests, row.output_nano_usd) for row in sums) == [
        ("acme", 2, 1800),
        ("other", 1, 1800),
    ]
    (still_open,) = await database.read(lambda it: it.execute(select(schema.open_requests)).all())
    assert (still_open.request_id, still_open.hold_nano_usd) == ("req_4", 10_000)
    await database.close()


async def test_booking_goes_on_after_the_migration(empty_database_url: str) -> None:
    """What was booked before is known again, and what was open can be closed."""
    database, keeper = Database(empty_database_url), Bookkeeper("workers")
    await database.write(_keep_first_books)
    await database.migrate()
    last: UsageEvent = closed("req_4", tenant_id="other", key_id="key_2")
    batch = [
        Delivery("usage", 0, offset, it.SerializeToString())
        for offset, it in enumerate([*EVENTS, last])
    ]
    result = await database.write(lambda it: keeper.book_batch(it, batch, 1_800_000_100))
    assert result == BatchResult(closed=1, duplicates=len(EVENTS))
    found = await database.read(verify)
    assert (found.ok, found.num_entries, found.num_open) == (True, 4, 0)
    balances = await database.read(lambda it: dict(it.execute(select(schema.balances)).all()))
    assert balances["receivable:other"] == 2 * AMOUNT_NANO_USD
    assert sum(balances.values()) == 0
    await database.close()
