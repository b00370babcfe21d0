"""From usage events to double-entry bookings: pure, so that a recount is the same code again.

A request's life in the books::

    (nothing) --OPENED--> open --CLOSED--> captured (amount > 0) or voided (amount 0)
    (nothing) --CLOSED--------------------> captured or voided; a later OPENED is only kept

Booking depends on one event at a time and each (request_id, kind) is booked once, so the order in
which events arrive and how often they come change nothing. What a CLOSED owes goes to the tenant's
receivable account and, split by class of tokens, from the model's revenue accounts: the postings of
an entry sum to zero. Nothing is ever changed; corrections are entries of their own::

    swept --a real CLOSED after all--> the difference, booked as "<request id>:correction"
    swept --and under another model--> all of that, and what was booked is taken back beside it,
                                       the request itself too
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from headrace_billing.daily import DailySums
from headrace_billing.key_rules import is_clean_text
from headrace_billing.prices import (
    Amounts,
    BadUsageError,
    NoPriceError,
    PriceBook,
    price_usage,
    uncached_tokens,
)
from headrace_common.price_rows import PriceRow
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1 import usage_pb2
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent, WorkerUsage

OPENED = UsageEvent.KIND_OPENED
CLOSED = UsageEvent.KIND_CLOSED
# What is added to the id of a request whose entry is corrected, and where it is taken back whole.
CORRECTION = ":correction"
_TAKEN_BACK = f":back{CORRECTION}"
# A million USD for one request is a mistake in the counts, not a bill.
MAX_AMOUNT_NANO_USD = 10**15
MAX_UNIX_US = 253_402_300_799_999_999
_MAX_ID_CHARS = 128
# Counts are of 32 bits.
_MAX_COUNT = 2**32 - 1
# In the order of the fields of `Amounts`.
_REVENUE_CLASSES = ("input", "cached_input", "cache_write", "output")


class BadEventError(Exception):
    """An event that can never be booked; the text says why."""


class Posting(NamedTuple):
    """One side of an entry. Positive = debit. Nano-USD."""

    account: str
    amount_nano_usd: int


class Entry(NamedTuple):
    """The one terminal entry of a request."""

    request_id: str
    amount_nano_usd: int
    postings: tuple[Posting, ...]

    @property
    def kind(self) -> str:
        """`captured` if something is owed, else `voided`; of a correction `corrected`."""
        if is_correction(self.request_id):
            return "corrected"
        return "captured" if self.amount_nano_usd else "voided"


class Booking(NamedTuple):
    """An event as it goes into the books."""

    # As booked: price version settled, usage replaced by the witness's where nobody closed it.
    event: UsageEvent
    # None for OPENED.
    entry: Entry | None
    # By class of tokens; all 0 while it is open.
    amounts: Amounts
    # The gateway computed another amount than the ledger.
    is_mismatch: bool = False

    @property
    def amount_nano_usd(self) -> int:
        """What the request owes; 0 while it is open."""
        return self.entry.amount_nano_usd if self.entry else 0


def book(event: UsageEvent, prices: PriceBook, witness: TokenUsage | None = None) -> Booking:
    """Turn an event into its booking.

    Args:
        event: as delivered; not changed.
        prices: all price rows known.
        witness: the worker's count of this request, used if nobody closed the request properly.

    Raises:
        BadEventError: it can never be booked.
    """
    is_swept = event.ending == usage_pb2.ENDING_SWEPT
    if event.kind == CLOSED and is_swept and witness is not None:
        seen = UsageEvent()
        seen.CopyFrom(event)
        seen.usage.CopyFrom(witness)
        seen.estimated = False
        # A count that cannot be is none.
        with contextlib.suppress(BadEventError):
            return book(seen, prices)
    check_event(event)
    booked = _settled(event, prices.version)
    amounts = _price(booked, prices)
    if event.kind == OPENED:
        return Booking(booked, None, amounts)
    entry = _entry(booked, amounts)
    # A correction's amount at the gateway was that of the whole request.
    is_said = not is_swept and not event.HasField("replaces")
    mismatch = is_said and event.amount_nano_usd != entry.amount_nano_usd
    return Booking(booked, entry, amounts, mismatch)


def check_event(event: UsageEvent) -> None:
    """Check that an event says what an event must say.

    Raises:
        BadEventError: it does not.
    """
    if event.kind not in (OPENED, CLOSED):
        raise BadEventError(f"kind {event.kind} is neither OPENED nor CLOSED")
    _check_ids(event)
    if max(event.occurred_unix_us, event.deadline_unix_us, event.admitted_unix_us) > MAX_UNIX_US:
        names = ("occurred_unix_us", "deadline_unix_us", "admitted_unix_us")
        late = next(name for name in names if getattr(event, name) > MAX_UNIX_US)
        raise BadEventError(f"{late} lies after the year 9999")
    if not (_is_consistent(event.usage) and _is_consistent(event.replaces)):
        raise BadEventError("token counts contradict one another: a part exceeds its whole")
    if event.HasField("replaces") != is_correction(event.request_id):
        raise BadEventError("a correction says what it replaces, and nothing else does")


def _check_ids(event: UsageEvent) -> None:
    needed = (event.request_id, event.tenant_id, event.model)
    together = "".join(needed) + event.project_id + event.key_id
    # The usual case at one stroke: what holds for the whole holds for every part.
    if all(needed) and together.isascii() and is_clean_text(together, _MAX_ID_CHARS):
        return
    for name in ("request_id", "tenant_id", "model"):
        if not getattr(event, name):
            raise BadEventError(f"{name} is empty")
    for name in ("request_id", "tenant_id", "project_id", "key_id", "model"):
        if not is_clean_text(getattr(event, name), _MAX_ID_CHARS):
            raise BadEventError(f"{name} is too long or holds control characters")


def is_correction(request_id: str) -> bool:
    """Tell whether an entry corrects that of a request."""
    return request_id.endswith(CORRECTION)


def correction_ids(request_id: str) -> tuple[str, str]:
    """Return the ids under which a request may be corrected."""
    return request_id + CORRECTION, request_id + _TAKEN_BACK


def corrected_id(correction_id: str) -> str:
    """Return whose entry a correction corrects."""
    return correction_id.removesuffix(_TAKEN_BACK).removesuffix(CORRECTION)


def corrections(booked: UsageEvent, late: UsageEvent) -> list[UsageEvent]:
    """Return the events that make up for the difference between two closes of a request.

    Args:
        booked: stands in the books; nobody at the gateway said it.
        late: the gateway's own, which came after that.

    Returns:
        Empty if both say the same; of two, the second is only to be booked if the first is new.
    """
    has_moved = late.model != booked.model and late.usage != TokenUsage()
    if late.usage == booked.usage and not has_moved:
        return []
    made = UsageEvent()
    made.CopyFrom(late)
    made.request_id, back_id = correction_ids(booked.request_id)
    # Whose request it was does not change.
    kept = ["tenant_id", "project_id", "key_id"]
    if not has_moved:
        # Nor does what fixed its price.
        kept += ["model", "price_version", "price_tier", "admitted_unix_us"]
        made.replaces.CopyFrom(booked.usage)
    for name in kept:
        setattr(made, name, getattr(booked, name))
    if not has_moved:
        return [made]
    made.replaces.SetInParent()
    made.moved_requests = 1
    back = UsageEvent()
    back.CopyFrom(booked)
    back.request_id, back.ending = back_id, late.ending
    back.replaces.SetInParent()
    back.replaces.MergeFrom(booked.usage)
    back.ClearField("usage")
    back.moved_requests = -1
    return [made, back]


def best_witness(usages: Iterable[WorkerUsage]) -> TokenUsage | None:
    """Return what the workers counted for one request.

    Of each of its prompts the fullest count, as counts are cumulative over resumes.
    """
    best: dict[str, WorkerUsage] = {}
    for usage in usages:
        known = best.setdefault(usage.request_id, usage)
        best[usage.request_id] = max(known, usage, key=fullness)
    if len(best) <= 1:
        return next((it.usage for it in best.values()), None)
    total = TokenUsage()
    for it in best.values():
        for counted, value in it.usage.ListFields():
            summed = min(getattr(total, counted.name) + value, _MAX_COUNT)
            setattr(total, counted.name, summed)
    return total


def fullness(it: WorkerUsage) -> tuple[int, int, int]:
    """Return what tells the fuller of two counts of the same work."""
    return it.usage.output_tokens, it.usage.prompt_tokens, it.occurred_unix_us


def swept(opened: UsageEvent, now_unix_us: int) -> UsageEvent:
    """Return the CLOSED for a request that nobody closed; its usage is for the witness to say."""
    return UsageEvent(
        kind=CLOSED,
        request_id=opened.request_id,
        tenant_id=opened.tenant_id,
        project_id=opened.project_id,
        key_id=opened.key_id,
        model=opened.model,
        price_version=opened.price_version,
        price_tier=opened.price_tier,
        occurred_unix_us=now_unix_us,
        admitted_unix_us=opened.admitted_unix_us or opened.occurred_unix_us,
        ending=usage_pb2.ENDING_SWEPT,
        estimated=True,
        duration_s=max(0, now_unix_us - opened.occurred_unix_us) / 1e6,
        endpoint=opened.endpoint,
        streaming=opened.streaming,
    )


def admitted_unix_s(event: UsageEvent) -> int:
    """Return when the request was admitted, which is when its price was fixed.

    A CLOSED that does not say it says it by its own time and duration: booking needs no other
    event.
    """
    if event.admitted_unix_us:
        return event.admitted_unix_us // 1_000_000
    admitted_us = event.occurred_unix_us
    if event.kind == CLOSED and 0 < event.duration_s * 1e6 < event.occurred_unix_us:
        admitted_us -= round(event.duration_s * 1e6)
    return admitted_us // 1_000_000


@dataclass
class Recount:
    """The books as the events alone make them. Feed events as booked, each once, in any order."""

    prices: PriceBook
    balances: dict[str, int] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    days: DailySums = field(default_factory=DailySums)

    def add(self, event: UsageEvent) -> Booking:
        """Book one more event.

        Raises:
            BadEventError: it can never have been booked.
        """
        booking = book(event, self.prices)
        if booking.entry is None:
            self.opened.add(event.request_id)
            return booking
        self.entries[event.request_id] = booking.entry
        self.days.add(event, admitted_unix_s(event), booking.amounts)
        for posting in booking.entry.postings:
            before = self.balances.get(posting.account, 0)
            self.balances[posting.account] = before + posting.amount_nano_usd
        return booking

    @property
    def open_requests(self) -> set[str]:
        """Requests that were opened and not closed."""
        return self.opened - self.entries.keys()


def _is_consistent(usage: TokenUsage) -> bool:
    try:
        uncached_tokens(usage)
    except BadUsageError:
        return False
    return usage.reasoning_tokens <= usage.output_tokens


def _settled(event: UsageEvent, newest_version: int) -> UsageEvent:
    """Return the event as it is booked: itself, or a copy where the version must be filled in."""
    # 0 = the gateway did not say. Written down, so that a later price cannot change a recount.
    version = min(event.price_version or newest_version, newest_version)
    if version == event.price_version:
        return event
    booked = UsageEvent()
    booked.CopyFrom(event)
    booked.price_version = version
    return booked


def _price(event: UsageEvent, prices: PriceBook) -> Amounts:
    row = _row_of(event, prices, event.usage.prompt_tokens)
    amounts = price_usage(event.usage, row)
    if event.HasField("replaces"):
        before = _row_of(event, prices, event.replaces.prompt_tokens)
        amounts = amounts.less(price_usage(event.replaces, before))
    if abs(amounts.total_nano_usd) > MAX_AMOUNT_NANO_USD:
        raise BadEventError(f"{amounts.total_nano_usd} nano-USD for one request is not plausible")
    return amounts


def _row_of(event: UsageEvent, prices: PriceBook, prompt_tokens: int) -> PriceRow:
    try:
        return prices.find(
            event.model,
            event.price_tier,
            event.price_version,
            admitted_unix_s(event),
            prompt_tokens,
        )
    except NoPriceError as error:
        raise BadEventError(str(error)) from error


def _entry(event: UsageEvent, amounts: Amounts) -> Entry:
    total = amounts.total_nano_usd
    if not any(amounts):
        return Entry(event.request_id, 0, ())
    names = zip(_revenue_accounts(event.model), amounts, strict=True)
    revenue = [Posting(name, -amount) for name, amount in names if amount]
    owed = Posting(account_of(event.tenant_id), total)
    return Entry(event.request_id, total, (owed, *revenue))


def account_of(tenant_id: str) -> str:
    """Return the account on which a tenant owes (above 0) or has money (below 0)."""
    return f"receivable:{tenant_id}"


@lru_cache(maxsize=1024)
def _revenue_accounts(model: str) -> tuple[str, ...]:
    return tuple(f"revenue:{model}:{name}" for name in _REVENUE_CLASSES)
