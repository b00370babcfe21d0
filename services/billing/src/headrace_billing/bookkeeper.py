"""Books batches of log messages: events, entries, postings, balances and log positions together.

Everything of a batch happens in the caller's one transaction, or nothing does. Which events are new
is decided by the primary key (request_id, kind) at the insert itself, so a batch may be repeated,
cut differently or booked by two processes at once without anything counting twice.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sqlalchemy import Connection, select

from headrace_billing import schema
from headrace_billing.daily import DailySums
from headrace_billing.deliveries import (
    Delivery,
    EventKey,
    bury,
    is_usable,
    keep_witnesses,
    move_positions,
    parse,
    witnesses_of,
)
from headrace_billing.ledger import (
    CLOSED,
    OPENED,
    BadEventError,
    Booking,
    admitted_unix_s,
    book,
    corrections,
)
from headrace_billing.open_requests import forget_open, keep_open
from headrace_billing.price_store import load_price_book
from headrace_billing.prices import PriceBook
from headrace_common.bulk_rows import add_rows, insert_missing_rows, insert_new_rows, insert_rows
from headrace_common.database import insert_new
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import ENDING_SWEPT, UsageEvent, WorkerUsage

_log = logging.getLogger(__name__)


@dataclass
class BatchResult:
    """What came of a batch."""

    opened: int = 0
    closed: int = 0
    duplicates: int = 0
    dead_letters: int = 0
    mismatches: int = 0
    late_closes: int = 0
    witnesses: int = 0


class Incoming(NamedTuple):
    """An event with the message it came in; the sweeper's own came in none."""

    event: UsageEvent
    delivery: Delivery | None = None


@dataclass
class _Reading:
    """A batch, read."""

    events: list[Incoming] = field(default_factory=list)
    witnesses: list[WorkerUsage] = field(default_factory=list)
    # (delivery, request id and kind as far as known, error)
    bad: list[tuple[Delivery, EventKey, str]] = field(default_factory=list)


class Bookkeeper:
    """The only writer of the books.

    Args:
        worker_topic: deliveries of this topic are `WorkerUsage`, all others `UsageEvent`.
        exports: closed requests are put on the exporter's list.
        replays: events are the ledger's own, its corrections among them.
    """

    def __init__(self, worker_topic: str, *, exports: bool = False, replays: bool = False) -> None:
        self._worker_topic = worker_topic
        self._exports, self._replays = exports, replays

    def book_batch(
        self, connection: Connection, deliveries: Sequence[Delivery], now_unix_s: int
    ) -> BatchResult:
        """Book messages and move the log positions behind them."""
        with _collector_paused():
            return self._book_batch(connection, deliveries, now_unix_s)

    def _book_batch(
        self, connection: Connection, deliveries: Sequence[Delivery], now_unix_s: int
    ) -> BatchResult:
        reading = self._read(deliveries)
        result = BatchResult(witnesses=keep_witnesses(connection, reading.witnesses))
        bad = self._book(connection, reading.events, "log", now_unix_s, result)
        reading.bad += [(it.delivery, _key(it.event), why) for it, why in bad if it.delivery]
        result.dead_letters = bury(connection, reading.bad, now_unix_s)
        move_positions(connection, deliveries)
        return result

    def bury(
        self, connection: Connection, delivery: Delivery, error: str, now_unix_s: int
    ) -> BatchResult:
        """Put a message that the database itself refuses among the dead letters and move on."""
        buried = bury(connection, [(delivery, self._known_key(delivery), error)], now_unix_s)
        move_positions(connection, [delivery])
        return BatchResult(dead_letters=buried)

    def book_swept(
        self, connection: Connection, events: Sequence[UsageEvent], now_unix_s: int
    ) -> BatchResult:
        """Book events that the sweeper made.

        Raises:
            BadEventError: the sweeper made one that cannot be booked.
        """
        result = BatchResult()
        incoming = [Incoming(event) for event in events]
        for it, why in self._book(connection, incoming, "sweeper", now_unix_s, result):
            raise BadEventError(f"{it.event.request_id}: {why}")
        return result

    def _read(self, deliveries: Sequence[Delivery]) -> _Reading:
        reading = _Reading()
        for delivery in deliveries:
            if delivery.topic == self._worker_topic:
                witness = parse(WorkerUsage, delivery.value)
                if witness is None or not is_usable(witness):
                    reading.bad.append((delivery, ("", 0), "not a WorkerUsage"))
                else:
                    reading.witnesses.append(witness)
                continue
            event = parse(UsageEvent, delivery.value)
            if event is None:
                reading.bad.append((delivery, ("", 0), "not a UsageEvent"))
            elif event.HasField("replaces") and not self._replays:
                reading.bad.append((delivery, _key(event), "only the ledger makes corrections"))
            else:
                reading.events.append(Incoming(event, delivery))
        return reading

    def _known_key(self, delivery: Delivery) -> EventKey:
        if delivery.topic == self._worker_topic:
            return ("", 0)
        event = parse(UsageEvent, delivery.value)
        return ("", 0) if event is None else _key(event)

    def _book(
        self,
        connection: Connection,
        events: Sequence[Incoming],
        source: str,
        now_unix_s: int,
        result: BatchResult,
    ) -> list[tuple[Incoming, str]]:
        prices = load_price_book(connection)
        witnesses = witnesses_of(connection, [it.event for it in events])
        bookings, repeated, bad = _price_all(events, prices, witnesses)
        new = self._enter(connection, bookings, source, _payloads(events))
        repeated += [booking for key, booking in bookings.items() if key not in new]
        result.duplicates += len(repeated)
        num_opened = sum(kind == OPENED for _, kind in new)
        result.opened += num_opened
        result.closed += len(new) - num_opened
        findings = [
            ("amount_mismatch", booking, _mismatch_text(booking))
            for key, booking in bookings.items()
            if key in new and booking.is_mismatch
        ]
        late, corrected = _compare_repeated(connection, repeated)
        findings += late
        firsts = self._correct(connection, [it[0] for it in corrected], prices)
        others = [event for it in corrected if it[0].request_id in firsts for event in it[1:]]
        self._correct(connection, others, prices)
        result.mismatches += sum(kind == "amount_mismatch" for kind, _, _ in findings)
        result.late_closes += _note_findings(connection, findings, now_unix_s)
        return bad

    def _correct(
        self, connection: Connection, events: Sequence[UsageEvent], prices: PriceBook
    ) -> set[str]:
        """Book what late closes change, each once; return the ids of those that were new."""
        bookings, _, bad = _price_all([Incoming(it) for it in events], prices, {})
        for it, why in bad:
            # The finding stays, for a person to decide on.
            _log.warning("request %s is not corrected: %s", it.event.request_id, why)
        return {it for it, _ in self._enter(connection, bookings, "correction", {})}

    def _enter(
        self,
        connection: Connection,
        bookings: dict[EventKey, Booking],
        source: str,
        payloads: dict[int, bytes],
    ) -> set[EventKey]:
        """Write events and what follows from them; return those that were new."""
        new = _insert_events(connection, bookings.values(), source, payloads)
        _book_new(connection, [bookings[key] for key in bookings if key in new])
        if self._exports:
            rows = [(request_id, 0) for request_id, kind in new if kind == CLOSED]
            insert_missing_rows(connection, schema.exports, rows)
        return new


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the collector from walking through a batch's thousands of objects; none is a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _payloads(events: Sequence[Incoming]) -> dict[int, bytes]:
    """Return the bytes of events that came as messages, by `id`: most are booked as they came."""
    return {id(it.event): it.delivery.value for it in events if it.delivery is not None}


def _key(event: UsageEvent) -> EventKey:
    return (event.request_id, event.kind)


def _price_all(
    events: Sequence[Incoming], prices: PriceBook, witnesses: dict[str, TokenUsage | None]
) -> tuple[dict[EventKey, Booking], list[Booking], list[tuple[Incoming, str]]]:
    first: dict[EventKey, Booking] = {}
    repeated: list[Booking] = []
    bad: list[tuple[Incoming, str]] = []
    for it in events:
        try:
            booking = book(it.event, prices, witnesses.get(it.event.request_id))
        except BadEventError as error:
            bad.append((it, str(error)))
            continue
        if first.setdefault(_key(it.event), booking) is not booking:
            repeated.append(booking)
    return first, repeated, bad


def _insert_events(
    connection: Connection,
    bookings: Iterable[Booking],
    source: str,
    payloads: dict[int, bytes],
) -> set[EventKey]:
    rows = [
        (
            it.event.request_id,
            int(it.event.kind),
            it.event.tenant_id,
            it.event.key_id,
            source,
            it.amount_nano_usd,
            payloads.get(id(it.event)) or it.event.SerializeToString(),
        )
        for it in bookings
    ]
    return {(key[0], key[1]) for key in insert_new_rows(connection, schema.usage_events, rows)}


def _book_new(connection: Connection, bookings: Sequence[Booking]) -> None:
    entries = [it.entry for it in bookings if it.entry is not None]
    insert_rows(
        connection,
        schema.entries,
        [(it.request_id, it.kind, it.amount_nano_usd) for it in entries],
    )
    postings = [
        (it.request_id, account, amount) for it in entries for account, amount in it.postings
    ]
    insert_rows(connection, schema.postings, postings)
    changes: dict[str, int] = {}
    for _, account, amount in postings:
        changes[account] = changes.get(account, 0) + amount
    add_rows(connection, schema.balances, sorted(changes.items()))
    days = DailySums()
    for it in bookings:
        if it.entry is not None:
            days.add(it.event, admitted_unix_s(it.event), it.amounts)
    add_rows(connection, schema.daily_usage, list(days.values()))
    opened = {it.event.request_id: it.event for it in bookings if it.entry is None}
    closed = {it.request_id for it in entries}
    # What began and ended in this batch was never written down as open.
    keep_open(connection, [event for key, event in opened.items() if key not in closed])
    forget_open(connection, closed - opened.keys())


Finding = tuple[str, Booking, str]


def _mismatch_text(booking: Booking) -> str:
    return (
        f"the gateway computed {booking.event.amount_nano_usd} nano-USD, "
        f"the ledger booked {booking.amount_nano_usd}"
    )


def _compare_repeated(
    connection: Connection, repeated: Sequence[Booking]
) -> tuple[list[Finding], list[list[UsageEvent]]]:
    """Look at events that came again: the same is fine, a different one is a finding.

    Returns:
        The findings, and the corrections of each request that was closed without its gateway.
    """
    if not repeated:
        return [], []
    table = schema.usage_events
    query = select(table.c.request_id, table.c.kind, table.c.amount_nano_usd, table.c.payload)
    ids = {it.event.request_id for it in repeated}
    stored = {
        (row.request_id, row.kind): (row.amount_nano_usd, UsageEvent.FromString(row.payload))
        for row in connection.execute(query.where(table.c.request_id.in_(ids)))
    }
    # The sweeper's close may have met a request that was closed a moment ago.
    forget_open(connection, [rid for rid, kind in stored if kind == CLOSED])
    findings: list[Finding] = []
    corrected: dict[str, list[UsageEvent]] = {}
    for booking in repeated:
        amount_nano_usd, before = stored[_key(booking.event)]
        if booking.entry is None:
            # Opened anew by another gateway, or by the same one after a crash: nothing is owed yet.
            continue
        if booking.event.ending == ENDING_SWEPT or _is_same(booking.event, before):
            continue
        is_late = before.ending == ENDING_SWEPT
        if is_late and (events := corrections(before, booking.event)):
            corrected.setdefault(before.request_id, events)
        name = "late_close" if is_late else "conflicting_duplicate"
        text = f"booked {amount_nano_usd} nano-USD, this one owes {booking.amount_nano_usd}"
        findings.append((name, booking, text))
    return findings, list(corrected.values())


def _is_same(event: UsageEvent, other: UsageEvent) -> bool:
    """Compare what was consumed; where and how often an outbox wrote it does not matter."""
    pair = []
    for it in (event, other):
        bare = UsageEvent()
        bare.CopyFrom(it)
        bare.ClearField("outbox_id")
        bare.ClearField("outbox_seq")
        pair.append(bare)
    return pair[0] == pair[1]


def _note_findings(connection: Connection, findings: Sequence[Finding], now_unix_s: int) -> int:
    """Write findings down, each once; return how many late closes are new."""
    rows = {
        (booking.event.request_id, name): {
            "request_id": booking.event.request_id,
            "finding": name,
            "detail": text,
            "payload": booking.event.SerializeToString(),
            "at_unix_s": now_unix_s,
        }
        for name, booking, text in findings
    }
    new = insert_new(connection, schema.reconciliation, list(rows.values()))
    return sum(row.finding == "late_close" for row in new)
