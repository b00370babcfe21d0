"""Books every event again into an empty database and compares: the books follow from the events.

The events go in another order and other batches than they came in. What is copied besides them is
what they are priced by and the journal of credits; the rest must come out by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, insert, select

from headrace_billing import schema
from headrace_billing.bookkeeper import Bookkeeper
from headrace_billing.credits import postings_of
from headrace_billing.deliveries import Delivery
from headrace_billing.desk import Desk
from headrace_billing.store import Database
from headrace_common.database import add_or_insert
from headrace_contracts.billing.v1 import billing_pb2 as pb

_PIECE_ROWS = 5000
_COMPARED = (schema.entries, schema.postings, schema.balances, schema.daily_usage)
Rows = Sequence[dict[str, Any]]  # Any: column values


async def replay(desk: Desk) -> pb.ReplayResponse:
    """Replay into a temporary SQLite database, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="headrace-replay-") as folder:
        target = Database(f"sqlite:///{Path(folder) / 'replay.db'}")
        loop = asyncio.get_running_loop()

        def write(work: Callable[[Connection], object]) -> None:
            asyncio.run_coroutine_threadsafe(target.write(work), loop).result()

        try:
            await target.migrate()
            num_events, books = await desk.read(lambda it: _book_again(it, write))
            copy = await target.read(digests)
        finally:
            await target.close()
    problems = [
        f"Table {name} differs: {books[name]} in the books, {copy[name]} in the replay."
        for name in books
        if books[name] != copy[name]
    ]
    return pb.ReplayResponse(
        ok=not problems,
        num_events=num_events,
        books_sha256=_joined(books),
        replay_sha256=_joined(copy),
        problems=problems,
    )


def _book_again(
    books: Connection, write: Callable[[Callable[[Connection], object]], None]
) -> tuple[int, dict[str, str]]:
    """Book everything elsewhere, on one unchanging view; return how many events, and digests."""
    prices, journal = _rows(books, schema.prices), _rows(books, schema.journal)
    write(lambda it: _copy_premises(it, prices, journal))
    keeper, num_events = Bookkeeper("", replays=True), 0
    # Backwards: every CLOSED before its OPENED.
    last: tuple[str, int] | None = None
    while piece := _piece(books, last):
        last = (piece[-1][0], piece[-1][1])
        batch = [Delivery("replay", 0, idx, payload) for idx, (_, _, payload) in enumerate(piece)]
        write(partial(keeper.book_batch, deliveries=batch, now_unix_s=0))
        num_events += len(batch)
    return num_events, digests(books)


def digests(connection: Connection) -> dict[str, str]:
    """Return a digest of each table that must come out the same."""
    return {table.name: _digest(connection, table) for table in _COMPARED}


def _rows(connection: Connection, table: Table) -> Rows:
    return [dict(row) for row in connection.execute(select(table)).mappings()]


def _copy_premises(connection: Connection, prices: Rows, journal: Rows) -> None:
    if prices:
        connection.execute(insert(schema.prices), list(prices))
    for row in journal:
        connection.execute(insert(schema.journal), row)
        postings = [
            {"account": it.account, "amount_nano_usd": it.amount_nano_usd}
            for it in sorted(
                postings_of(pb.Credit.FromString(row["payload"])), key=lambda it: it.account
            )
        ]
        connection.execute(
            insert(schema.journal_postings),
            [{"journal_id": row["journal_id"], **it} for it in postings],
        )
        add_or_insert(connection, schema.balances, postings)


def _piece(connection: Connection, before: tuple[str, int] | None) -> list[tuple[str, int, bytes]]:
    events = schema.usage_events
    query = (
        select(events.c.request_id, events.c.kind, events.c.payload)
        .order_by(events.c.request_id.desc(), events.c.kind.desc())
        .limit(_PIECE_ROWS)
    )
    if before is not None:
        query = query.where(
            (events.c.request_id < before[0])
            | ((events.c.request_id == before[0]) & (events.c.kind < before[1]))
        )
    return [(row.request_id, row.kind, row.payload) for row in connection.execute(query)]


def _digest(connection: Connection, table: Table) -> str:
    state = hashlib.sha256()
    for line in sorted(_lines(connection, table)):
        state.update(line.encode())
    return state.hexdigest()


def _lines(connection: Connection, table: Table) -> Iterator[str]:
    # Sorted here: databases order texts differently.
    for row in connection.execute(select(table)):
        yield "\t".join(str(value) for value in row) + "\n"


def _joined(tables: dict[str, str]) -> str:
    return hashlib.sha256("".join(tables.values()).encode()).hexdigest()
