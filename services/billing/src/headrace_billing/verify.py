"""Recounts the books from the events and compares, in pieces, on one unchanging view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, Table, func, select

from headrace_billing import schema
from headrace_billing.daily import DailySums
from headrace_billing.ledger import BadEventError, Entry, Posting, Recount, is_correction
from headrace_billing.price_store import load_price_book
from headrace_billing.prices import PriceBook
from headrace_billing.usage_sums import stored_days
from headrace_billing.verify_accounts import check_invoices, check_journal
from headrace_contracts.billing.v1.billing_pb2 import VerifyResponse
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent

MAX_PROBLEMS = 100
_REQUESTS_PER_PIECE = 1000


@dataclass
class _Findings:
    problems: list[str] = field(default_factory=list)
    balances: dict[str, int] = field(default_factory=dict)
    days: DailySums = field(default_factory=DailySums)
    num_events: int = 0
    num_entries: int = 0
    num_corrections: int = 0
    num_open: int = 0


def verify(connection: Connection) -> VerifyResponse:
    """Recount everything.

    `ok` means that the books are right: they follow from the events and sum to zero. Differences
    with what gateways said (late closes, other amounts) are listed too, but are no fault of the
    books.
    """
    prices, found = load_price_book(connection), _Findings()
    for low, high in _pieces(connection):
        _check_piece(connection, prices, low, high, found)
    found.problems += check_journal(connection, found.balances)
    found.problems += check_invoices(connection)
    _check_balances(connection, found)
    _check_days(connection, found)
    postings_sum = _total(connection, schema.postings)
    postings_sum += _total(connection, schema.journal_postings)
    if postings_sum:
        found.problems.append(f"All postings sum to {postings_sum} nano-USD instead of 0.")
    return VerifyResponse(
        ok=not found.problems,
        num_events=found.num_events,
        num_entries=found.num_entries,
        num_corrections=found.num_corrections,
        num_open=found.num_open,
        postings_sum_nano_usd=postings_sum,
        num_dead_letters=_count(connection, schema.dead_letters),
        problems=[*found.problems, *_reconciliation(connection)][:MAX_PROBLEMS],
    )


def _pieces(connection: Connection) -> Iterator[tuple[str, str]]:
    """Cut the request ids of all events into ranges (low, high]."""
    column, low = schema.usage_events.c.request_id, ""
    while True:
        ids = select(column).where(column > low).group_by(column).order_by(column)
        piece = list(connection.execute(ids.limit(_REQUESTS_PER_PIECE)).scalars())
        if not piece:
            return
        yield low, piece[-1]
        low = piece[-1]


def _check_piece(
    connection: Connection, prices: PriceBook, low: str, high: str, found: _Findings
) -> None:
    recount = Recount(prices)
    for row in _rows(connection, schema.usage_events, low, high):
        found.num_events += 1
        try:
            booking = recount.add(UsageEvent.FromString(row.payload))
        except BadEventError as error:
            found.problems.append(f"Event {row.request_id}/{row.kind} cannot be booked: {error}.")
            continue
        if booking.amount_nano_usd != row.amount_nano_usd:
            found.problems.append(
                f"Event {row.request_id}/{row.kind} says {row.amount_nano_usd} nano-USD, "
                f"the recount {booking.amount_nano_usd}."
            )
    for account, amount in recount.balances.items():
        found.balances[account] = found.balances.get(account, 0) + amount
    found.days.merge(recount.days)
    entries = _stored_entries(connection, low, high)
    num_corrections = sum(map(is_correction, entries))
    found.num_entries += len(entries) - num_corrections
    found.num_corrections += num_corrections
    found.problems += _compare_entries(entries, recount.entries)
    open_ids = {row.request_id for row in _rows(connection, schema.open_requests, low, high)}
    found.num_open += len(recount.open_requests)
    found.problems += [
        f"Request {request_id} is {'wrongly' if request_id in open_ids else 'not'} listed as open."
        for request_id in sorted(open_ids ^ recount.open_requests)
    ]


def _stored_entries(connection: Connection, low: str, high: str) -> dict[str, Entry]:
    postings: dict[str, list[Posting]] = {}
    for row in _rows(connection, schema.postings, low, high):
        posting = Posting(row.account, row.amount_nano_usd)
        postings.setdefault(row.request_id, []).append(posting)
    return {
        row.request_id: Entry(
            row.request_id, row.amount_nano_usd, tuple(postings.get(row.request_id, ()))
        )
        for row in _rows(connection, schema.entries, low, high)
    }


def _compare_entries(stored: dict[str, Entry], counted: dict[str, Entry]) -> list[str]:
    problems = []
    for request_id in sorted(stored.keys() | counted.keys()):
        have, want = stored.get(request_id), counted.get(request_id)
        if have is None or want is None:
            problems.append(
                f"Request {request_id} has {'no entry' if have is None else 'an entry'} but "
                f"{'was' if have is None else 'was not'} closed."
            )
        elif have.amount_nano_usd != want.amount_nano_usd:
            problems.append(
                f"Entry {request_id} is {have.amount_nano_usd} nano-USD, "
                f"the recount {want.amount_nano_usd}."
            )
        elif set(have.postings) != set(want.postings):
            problems.append(f"Entry {request_id} has other postings than the recount.")
    return problems


def _check_balances(connection: Connection, found: _Findings) -> None:
    rows = connection.execute(select(schema.balances)).all()
    stored = {row.account: row.amount_nano_usd for row in rows}
    for account in sorted(stored.keys() | found.balances.keys()):
        have, want = stored.get(account, 0), found.balances.get(account, 0)
        if have != want:
            found.problems.append(f"Balance {account} is {have} nano-USD, the recount {want}.")
    for table in (schema.entries, schema.open_requests):
        extra = _without_event(connection, table)
        found.problems += [f"Request {it} is in {table.name} without any event." for it in extra]


def _check_days(connection: Connection, found: _Findings) -> None:
    stored = stored_days(connection).sums
    for key in sorted(stored.keys() | found.days.sums.keys()):
        if stored.get(key) != found.days.sums.get(key):
            found.problems.append(
                f"Daily usage {key} is {stored.get(key)}, the recount {found.days.sums.get(key)}."
            )


def _without_event(connection: Connection, table: Table) -> list[str]:
    events = select(schema.usage_events.c.request_id)
    query = select(table.c.request_id).where(table.c.request_id.not_in(events))
    return list(connection.execute(query.limit(MAX_PROBLEMS)).scalars())


def _reconciliation(connection: Connection) -> list[str]:
    table = schema.reconciliation
    rows = connection.execute(select(table).order_by(table.c.request_id).limit(MAX_PROBLEMS))
    return [f"Note: {row.finding} of {row.request_id}: {row.detail}." for row in rows]


def _rows(
    connection: Connection, table: Table, low: str, high: str
) -> Iterator[Row[Any]]:  # Any: the table's columns
    column = table.c.request_id
    yield from connection.execute(
        select(table).where(column > low, column <= high).order_by(column)
    )


def _count(connection: Connection, table: Table) -> int:
    return connection.execute(select(func.count()).select_from(table)).scalar_one()


def _total(connection: Connection, table: Table) -> int:
    return int(connection.execute(select(func.sum(table.c.amount_nano_usd))).scalar() or 0)
