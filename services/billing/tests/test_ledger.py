"""The pure ledger: what an event becomes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_billing.ledger import (
    BadEventError,
    Recount,
    admitted_unix_s,
    best_witness,
    book,
    swept,
)
from headrace_billing.prices import PriceBook
from headrace_common.price_rows import PriceRow
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import (
    ENDING_SWEPT,
    PRICE_TIER_STANDARD,
    UsageEvent,
)
from headrace_testing.usage_events import (
    ADMITTED_UNIX_US,
    AMOUNT_NANO_USD,
    MODEL,
    USAGE,
    closed,
    opened,
    witnessed,
)

PRICES = PriceBook(
    [
        PriceRow(MODEL, PRICE_TIER_STANDARD, 0, 0, 20, 2, 25, 60, version=1),
        PriceRow(MODEL, PRICE_TIER_STANDARD, 0, 0, 40, 4, 50, 120, version=2),
    ]
)


def test_a_closed_request_is_owed_by_its_tenant_and_earned_by_its_model() -> None:
    """One debit, a credit for each class of tokens; together nothing."""
    booking = book(closed(), PRICES)
    assert booking.entry is not None
    postings = {it.account: it.amount_nano_usd for it in booking.entry.postings}
    assert postings == {
        "receivable:acme": AMOUNT_NANO_USD,
        f"revenue:{MODEL}:input": -1200,
        f"revenue:{MODEL}:cached_input": -80,
        f"revenue:{MODEL}:output": -1800,
    }
    assert sum(postings.values()) == 0
    assert booking.entry.kind == "captured"
    assert not booking.is_mismatch


def test_an_opened_request_books_nothing() -> None:
    """Money moves at the end only."""
    booking = book(opened(), PRICES)
    assert booking.entry is None
    assert booking.amount_nano_usd == 0


def test_a_request_without_tokens_is_voided() -> None:
    """It has a terminal entry all the same, without postings."""
    booking = book(closed(usage=TokenUsage(), amount_nano_usd=0), PRICES)
    assert booking.entry is not None
    assert (booking.entry.kind, booking.entry.postings) == ("voided", ())


def test_the_ledger_counts_itself() -> None:
    """A gateway's other amount is noted, not booked."""
    booking = book(closed(amount_nano_usd=1), PRICES)
    assert booking.amount_nano_usd == AMOUNT_NANO_USD
    assert booking.is_mismatch


def test_the_price_is_that_of_admission() -> None:
    """Version 2 doubles the price; a request of version 1 does not see it."""
    later = closed()
    later.price_version = 2
    assert book(closed(), PRICES).amount_nano_usd == AMOUNT_NANO_USD
    assert book(later, PRICES).amount_nano_usd == 2 * AMOUNT_NANO_USD


@pytest.mark.parametrize("version", [0, 3, 2**64 - 1])
def test_an_unknown_price_version_is_settled_at_booking(version: int) -> None:
    """The newest known is written into the booked event, so a later price changes no recount."""
    event = closed()
    event.price_version = version
    assert book(event, PRICES).event.price_version == 2
    assert event.price_version == version


def test_admission_is_told_by_the_close_alone() -> None:
    """Booking needs no other event: duration gives the time of admission."""
    assert admitted_unix_s(closed()) == admitted_unix_s(opened()) == ADMITTED_UNIX_US // 10**6
    for duration_s in (0.0, -1.0, float("inf"), float("nan"), 1e300):
        event = closed()
        event.duration_s = duration_s
        assert admitted_unix_s(event) == event.occurred_unix_us // 10**6


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("kind", 0, "kind"),
        ("request_id", "", "request_id is empty"),
        ("tenant_id", "", "tenant_id is empty"),
        ("model", "", "model is empty"),
        ("request_id", "a\x00b", "control characters"),
        ("key_id", "k" * 129, "too long"),
        ("occurred_unix_us", 2**64 - 1, "9999"),
        ("deadline_unix_us", 2**63, "9999"),
        ("model", "unknown", "no price"),
        ("usage", TokenUsage(prompt_tokens=1, cached_gpu_tokens=2), "contradict"),
        ("usage", TokenUsage(output_tokens=1, reasoning_tokens=2), "contradict"),
    ],
)
def test_what_cannot_be_booked_says_why(field: str, value: object, text: str) -> None:
    """Such an event goes to the dead letters with this sentence."""
    event = UsageEvent()
    event.CopyFrom(closed())
    event.ClearField(field)  # type: ignore[arg-type]
    event.MergeFrom(UsageEvent(**{field: value}))  # type: ignore[arg-type]
    with pytest.raises(BadEventError, match=text):
        book(event, PRICES)


def test_an_absurd_amount_is_not_booked() -> None:
    """A million USD for one request is an error in the counts."""
    dear = PriceBook([PriceRow(MODEL, PRICE_TIER_STANDARD, 0, 0, 10**9, 0, 0, 0, version=1)])
    with pytest.raises(BadEventError, match="not plausible"):
        book(closed(usage=TokenUsage(prompt_tokens=2_000_000)), dear)


def test_a_swept_request_is_billed_by_the_workers_count() -> None:
    """What was made is owed even if the gateway died."""
    close = swept(opened(), ADMITTED_UNIX_US + 600_000_000)
    booking = book(close, PRICES, USAGE)
    assert booking.amount_nano_usd == AMOUNT_NANO_USD
    assert not booking.event.estimated
    assert not booking.is_mismatch
    assert book(close, PRICES).amount_nano_usd == 0
    assert book(close, PRICES).event.estimated


def test_a_swept_request_keeps_its_price_of_admission() -> None:
    """However late it is swept."""
    close = swept(opened(), ADMITTED_UNIX_US + 10**12)
    assert admitted_unix_s(close) == ADMITTED_UNIX_US // 10**6
    assert close.price_version == opened().price_version
    assert close.ending == ENDING_SWEPT


def test_a_real_close_needs_no_witness() -> None:
    """The gateway's count stands; a nonsensical witness never does."""
    other = TokenUsage(prompt_tokens=100, output_tokens=99)
    assert book(closed(), PRICES, other).amount_nano_usd == AMOUNT_NANO_USD
    nonsense = TokenUsage(prompt_tokens=1, cached_gpu_tokens=2)
    assert book(swept(opened(), ADMITTED_UNIX_US), PRICES, nonsense).amount_nano_usd == 0


def test_the_fullest_witness_counts() -> None:
    """Counts are cumulative over resumes, so the last replica's hold the others'."""
    first = witnessed(usage=TokenUsage(prompt_tokens=10, output_tokens=5))
    second = witnessed(usage=TokenUsage(prompt_tokens=10, output_tokens=12), worker_id="w2")
    assert best_witness([second, first]) == second.usage
    assert best_witness([]) is None


@given(st.permutations([make(f"r{i}") for i in range(4) for make in (opened, closed)]), st.data())
def test_order_does_not_change_a_recount(events: list[UsageEvent], data: st.DataObject) -> None:
    """Each event once, in any order: the same balances, sum zero, nothing open."""
    left_out = data.draw(
        st.sampled_from([it for it in events if it.kind == UsageEvent.KIND_CLOSED])
    )
    recount = Recount(PRICES)
    for event in events:
        if event is not left_out:
            recount.add(event)
    assert sum(recount.balances.values()) == 0
    assert recount.balances["receivable:acme"] == 3 * AMOUNT_NANO_USD
    assert recount.open_requests == {left_out.request_id}
