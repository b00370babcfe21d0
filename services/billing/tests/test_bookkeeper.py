"""Bookings in SQL: each event once, all or nothing, in any order."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from google.protobuf.message import Message
from sqlalchemy import Connection, func, select, text

from headrace_billing import schema
from headrace_billing.audit import Stamp
from headrace_billing.bookkeeper import BatchResult, Bookkeeper
from headrace_billing.changes import ChangeFeed
from headrace_billing.consumer import read_positions
from headrace_billing.deliveries import Delivery
from headrace_billing.desk import Desk
from headrace_billing.price_store import add_price
from headrace_billing.replay import replay
from headrace_billing.spend_store import get_spends
from headrace_billing.store import Database
from headrace_billing.usage_store import find_missing, list_usage
from headrace_billing.usage_sums import stored_days
from headrace_billing.verify import verify
from headrace_common.clock import SystemClock
from headrace_contracts.billing.v1.billing_pb2 import (
    EventId,
    GetSpendRequest,
    ListUsageRequest,
    Price,
    SpendQuery,
)
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import (
    LEVEL_KEY,
    LEVEL_MODEL,
    LEVEL_PROJECT,
    LEVEL_TENANT,
)
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import (
    ENDING_CLIENT_GONE,
    ENDING_SWEPT,
    UsageEvent,
    WorkerUsage,
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

T = TypeVar("T")
NOW = 1_800_000_100
WORKERS = "workers"


def deliveries(messages: Sequence[Message | bytes], start: int = 0) -> list[Delivery]:
    """Give messages the places they would have in a log."""
    return [
        Delivery(
            topic=WORKERS if isinstance(it, WorkerUsage) else "usage",
            partition=0,
            offset=start + idx,
            value=it if isinstance(it, bytes) else it.SerializeToString(),
        )
        for idx, it in enumerate(messages)
    ]


class Books:
    """Shortcuts for one database."""

    def __init__(self, database: Database) -> None:
        self.database, self.keeper = database, Bookkeeper(WORKERS)

    async def book(self, *messages: Message | bytes) -> BatchResult:
        batch = deliveries(messages)
        return await self.database.write(lambda it: self.keeper.book_batch(it, batch, NOW))

    async def read(self, work: Callable[[Connection], T]) -> T:
        return await self.database.read(work)

    async def balances(self) -> dict[str, int]:
        rows = await self.read(lambda it: it.execute(select(schema.balances)).all())
        return dict(rows)

    async def findings(self) -> list[tuple[str, str]]:
        table = schema.reconciliation
        query = select(table.c.request_id, table.c.finding).order_by(table.c.request_id)
        return [tuple(row) for row in await self.read(lambda it: it.execute(query).all())]


@pytest.fixture
def books(database: Database) -> Books:
    return Books(database)


async def test_a_request_is_open_until_its_close_is_booked(books: Books) -> None:
    """Then the tenant owes and the books still sum to zero."""
    assert await books.book(opened()) == BatchResult(opened=1)
    assert (await books.read(verify)).num_open == 1
    assert await books.balances() == {}
    assert await books.book(closed()) == BatchResult(closed=1)
    found = await books.read(verify)
    assert (found.ok, found.num_open, found.num_entries, found.num_events) == (True, 0, 1, 2)
    balances = await books.balances()
    assert balances["receivable:acme"] == AMOUNT_NANO_USD
    assert sum(balances.values()) == 0


async def test_an_event_that_comes_again_changes_nothing(books: Books) -> None:
    """In the same batch or a later one, from another place of an outbox too."""
    again = closed()
    again.outbox_id, again.outbox_seq = "other", 77
    assert await books.book(opened(), opened(), closed(), again) == BatchResult(
        opened=1, closed=1, duplicates=2
    )
    assert await books.book(closed(), opened()) == BatchResult(duplicates=2)
    assert (await books.balances())["receivable:acme"] == AMOUNT_NANO_USD
    assert await books.findings() == []


async def test_an_opened_that_comes_late_does_not_open_again(books: Books) -> None:
    """A closed request stays closed, whatever the order."""
    await books.book(closed())
    await books.book(opened())
    found = await books.read(verify)
    assert (found.ok, found.num_open, found.num_events) == (True, 0, 2)


async def test_a_request_opened_anew_is_no_finding(books: Books) -> None:
    """Another gateway answers it, later and at another price: nothing is owed for either record."""
    await books.book(opened())
    again = opened()
    again.occurred_unix_us += 9_000_000
    again.hold_nano_usd += 1
    result = await books.book(again)
    assert result.duplicates == 1
    assert await books.findings() == []


async def test_a_different_close_of_the_same_request_is_a_finding(books: Books) -> None:
    """The first stands; the difference is written down once."""
    other = closed(usage=TokenUsage(prompt_tokens=1), ending=ENDING_CLIENT_GONE)
    await books.book(closed())
    await books.book(other)
    await books.book(other)
    assert (await books.balances())["receivable:acme"] == AMOUNT_NANO_USD
    assert await books.findings() == [("req_1", "conflicting_duplicate")]


@pytest.mark.parametrize(
    "counted",
    [
        TokenUsage(),
        TokenUsage(prompt_tokens=USAGE.prompt_tokens + 50, output_tokens=USAGE.output_tokens + 9),
    ],
)
async def test_a_real_close_after_a_swept_one_is_made_up_for_once(
    books: Books, counted: TokenUsage
) -> None:
    """A counter-entry brings the books to what was used, up or down, however often it comes."""
    await books.book(opened(), closed(ending=ENDING_SWEPT, usage=counted))
    assert await books.book(closed()) == BatchResult(duplicates=1, late_closes=1)
    assert await books.book(closed(), closed()) == BatchResult(duplicates=2)
    other = Books(books.database)
    await other.book(closed(usage=TokenUsage(prompt_tokens=1)))
    assert (await books.balances())["receivable:acme"] == AMOUNT_NANO_USD
    assert ("req_1", "late_close") in await books.findings()
    found = await books.read(verify)
    assert (found.ok, found.num_entries, found.num_corrections) == (True, 1, 1)
    days = await books.read(stored_days)
    ((requests, uncached, cached, written, output, *_),) = days.sums.values()
    told = (requests, uncached + cached + written, output)
    assert told == (1, USAGE.prompt_tokens, USAGE.output_tokens)
    listed = await books.read(lambda it: list_usage(it, ListUsageRequest(request_id="req_1")))
    assert listed.total_nano_usd == AMOUNT_NANO_USD
    (record,) = listed.records
    assert (record.event.usage, record.amount_nano_usd) == (USAGE, AMOUNT_NANO_USD)
    again = await replay(
        Desk(books.database, ChangeFeed(books.database), SystemClock(), kept_days=1)
    )
    assert again.ok, again.problems


@pytest.mark.parametrize("counted", [TokenUsage(), TokenUsage(prompt_tokens=7), USAGE])
async def test_a_late_close_of_another_model_is_owed_at_its_price(
    books: Books, counted: TokenUsage
) -> None:
    """The request fell back to it before its gateway went away; `opened` names the first one."""
    dear = Price(model="dear", input_nano_usd=900, output_nano_usd=9000)
    await books.database.write(lambda it: add_price(it, dear, Stamp(NOW)))
    await books.book(opened(), closed(ending=ENDING_SWEPT, usage=counted))
    late = closed(usage=TokenUsage(prompt_tokens=10, output_tokens=2), amount_nano_usd=27_000)
    late.model, late.price_version = "dear", 2
    await books.book(late)
    # What else is said of it has no effect any more.
    await books.book(late, closed(usage=TokenUsage(prompt_tokens=1)))
    left = {account: amount for account, amount in (await books.balances()).items() if amount}
    assert left == {
        "receivable:acme": 27_000,
        "revenue:dear:input": -9000,
        "revenue:dear:output": -18_000,
    }
    listed = await books.read(lambda it: list_usage(it, ListUsageRequest(request_id="req_1")))
    (record,) = listed.records
    assert (record.event.model, record.amount_nano_usd) == ("dear", 27_000)
    assert (record.event.usage, listed.total_nano_usd) == (late.usage, 27_000)
    days = await books.read(stored_days)
    sums = {key[4]: values for key, values in days.sums.items()}
    assert not any(sums[MODEL])
    assert (sums["dear"][0], sums["dear"][1], sums["dear"][4]) == (1, 10, 2)
    assert (await books.read(verify)).ok
    again = await replay(
        Desk(books.database, ChangeFeed(books.database), SystemClock(), kept_days=1)
    )
    assert again.ok, again.problems


async def test_a_replay_sees_the_books_at_one_moment(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is booked while it runs is no difference."""
    monkeypatch.setattr("headrace_billing.replay._PIECE_ROWS", 4)
    await books.book(*(closed(f"req_{number:02d}") for number in range(40)))
    desk = Desk(books.database, ChangeFeed(books.database), SystemClock(), kept_days=1)
    replaying = asyncio.create_task(replay(desk))
    number = 40
    while not replaying.done():
        await books.book(closed(f"req_{number:03d}"))
        number += 1
        await asyncio.sleep(0)
    again = await replaying
    assert again.ok, again.problems
    assert 40 <= again.num_events < number


async def test_a_late_close_that_says_the_same_changes_nothing(books: Books) -> None:
    """The worker's count was right: only how it ended was not known."""
    await books.book(opened(), closed(ending=ENDING_SWEPT))
    await books.book(closed())
    found = await books.read(verify)
    assert (found.ok, found.num_entries, found.num_corrections) == (True, 1, 0)


async def test_nobody_else_makes_corrections(books: Books) -> None:
    """One that comes by the log is not booked, nor is an id that looks like one."""
    forged = closed(request_id="req_1:correction")
    bare = await books.book(forged)
    forged.replaces.CopyFrom(USAGE)
    assert await books.book(forged) == BatchResult(dead_letters=1)
    assert (bare.dead_letters, await books.balances()) == (1, {})


async def test_a_swept_close_after_a_real_one_is_nothing_new(books: Books) -> None:
    """The gateway's recovery and its close may cross."""
    await books.book(closed())
    await books.book(closed(ending=ENDING_SWEPT, usage=TokenUsage()))
    assert await books.findings() == []


async def test_a_swept_close_takes_the_workers_count(books: Books) -> None:
    """Also when both come in one batch, in the order the log gives them."""
    swept = closed(ending=ENDING_SWEPT, usage=TokenUsage(), amount_nano_usd=0)
    less = witnessed(usage=TokenUsage(prompt_tokens=100, output_tokens=1), worker_id="w0")
    result = await books.book(less, witnessed(), witnessed(), opened(), swept)
    assert (result.witnesses, result.mismatches) == (2, 0)
    assert (await books.balances())["receivable:acme"] == AMOUNT_NANO_USD
    events = await books.read(lambda it: it.execute(select(schema.usage_events.c.payload)).all())
    assert any(UsageEvent.FromString(row.payload).usage == USAGE for row in events)
    assert (await books.read(verify)).ok


async def test_a_swept_close_takes_the_counts_of_all_its_prompts(books: Books) -> None:
    """Workers count each prompt under an id of its own; tries of a batch's line are not prompts."""
    swept = closed(ending=ENDING_SWEPT, usage=TokenUsage(), amount_nano_usd=0)
    await books.book(
        witnessed("req_1#0", usage=TokenUsage(prompt_tokens=10, output_tokens=2)),
        witnessed("req_1#0", usage=TokenUsage(prompt_tokens=10, output_tokens=5), worker_id="w2"),
        witnessed("req_1#11", usage=TokenUsage(prompt_tokens=4, output_tokens=1)),
        witnessed("req_1.1", usage=TokenUsage(prompt_tokens=900, output_tokens=900)),
        witnessed("req_11#0", usage=TokenUsage(prompt_tokens=900, output_tokens=900)),
        opened(),
        swept,
    )
    events = await books.read(lambda it: it.execute(select(schema.usage_events.c.payload)).all())
    counted = TokenUsage(prompt_tokens=14, output_tokens=6)
    assert any(UsageEvent.FromString(row.payload).usage == counted for row in events)
    assert (await books.read(verify)).ok


async def test_another_amount_of_the_gateway_is_counted_not_booked(books: Books) -> None:
    """The books stay right; the difference is listed."""
    result = await books.book(closed(amount_nano_usd=5))
    assert result.mismatches == 1
    found = await books.read(verify)
    assert found.ok
    assert "computed 5 nano-USD, the ledger booked 3080" in found.problems[0]


async def test_poison_is_kept_and_the_rest_goes_on(books: Books) -> None:
    """Bytes, place and reason are there for a person; delivered again, it is kept once."""
    bad_event = closed("req_bad", usage=TokenUsage(prompt_tokens=1, cached_gpu_tokens=2))
    messages = [b"\xff\xff\xff", opened(), bad_event, closed("a\x00b"), b"", closed()]
    result = await books.book(*messages)
    assert (result.opened, result.closed, result.dead_letters) == (1, 1, 4)
    assert (await books.book(*messages)).dead_letters == 0
    letters = await books.read(
        lambda it: it.execute(select(schema.dead_letters).order_by("log_offset")).all()
    )
    assert [(row.log_offset, row.request_id, row.error[:12]) for row in letters] == [
        (0, "", "not a UsageE"),
        (2, "req_bad", "token counts"),
        (3, "", "request_id i"),
        (4, "", "kind 0 is ne"),
    ]
    assert letters[0].payload == b"\xff\xff\xff"
    found = await books.read(verify)
    assert (found.ok, found.num_dead_letters) == (True, 4)


async def test_a_bad_event_does_not_bury_a_good_one_of_the_same_request(books: Books) -> None:
    """Each message is judged by itself."""
    bad = closed(usage=TokenUsage(prompt_tokens=1, cached_gpu_tokens=2))
    result = await books.book(closed(), bad)
    assert (result.closed, result.dead_letters) == (1, 1)
    (letter,) = await books.read(lambda it: it.execute(select(schema.dead_letters)).all())
    assert letter.payload == bad.SerializeToString()


async def test_a_worthless_witness_is_poison_too(books: Books) -> None:
    """It has no request to speak for."""
    result = await books.book(WorkerUsage(usage=USAGE))
    assert (result.witnesses, result.dead_letters) == (0, 1)


async def test_positions_move_with_the_bookings(books: Books) -> None:
    """Forwards, and backwards when a log began anew."""
    await books.book(opened(), closed(), witnessed())
    positions = await books.read(read_positions)
    assert {key: it.next_offset for key, it in positions.items()} == {
        ("usage", 0): 2,
        (WORKERS, 0): 3,
    }
    await books.book(opened("req_2"))
    assert (await books.read(read_positions))["usage", 0].next_offset == 1


async def test_a_batch_that_fails_in_the_middle_leaves_nothing(books: Books) -> None:
    """Events, postings, balances and positions share one transaction."""

    def fail(connection: Connection) -> None:
        books.keeper.book_batch(connection, deliveries([opened(), closed()]), NOW)
        connection.execute(text("SELECT * FROM no_such_table"))

    with pytest.raises(Exception, match=r"no_such_table|Unavailable|cannot answer"):
        await books.database.write(fail)
    for table in schema.metadata.sorted_tables:
        if table.name in ("usage_events", "entries", "postings", "balances", "log_positions"):
            count = select(func.count()).select_from(table)
            assert await books.read(lambda it, count=count: it.execute(count).scalar()) == 0
    assert await books.book(opened(), closed()) == BatchResult(opened=1, closed=1)


async def test_an_event_without_deadline_is_looked_after_in_an_hour(books: Books) -> None:
    """No request stays open for ever."""
    event = opened()
    event.ClearField("deadline_unix_us")
    await books.book(event)
    row = (await books.read(lambda it: it.execute(select(schema.open_requests)).all()))[0]
    assert row.deadline_unix_us == ADMITTED_UNIX_US + 3600 * 10**6


async def test_a_dead_letter_is_not_missing(books: Books) -> None:
    """An outbox would send it again for ever; the ledger has its bytes."""
    bad = closed("req_bad", usage=TokenUsage(prompt_tokens=1, cached_gpu_tokens=2))
    await books.book(bad)
    asked = [
        EventId(request_id="req_bad", kind=UsageEvent.KIND_CLOSED),
        EventId(request_id="req_bad", kind=UsageEvent.KIND_OPENED),
        EventId(request_id="nul\x00", kind=UsageEvent.KIND_OPENED),
    ]
    assert await books.read(lambda it: find_missing(it, asked)) == asked[1:]


async def test_a_gateway_that_died_with_thousands_of_requests_holds_up_nothing(
    books: Books,
) -> None:
    """Its closes come in one batch; each gets its witness, those of several prompts too."""
    ids = [f"req_{number:04d}" for number in range(2000)]
    await books.book(witnessed("req_0007"), witnessed("req_1999#0"), witnessed("req_1999#1"))
    swept = [closed(it, usage=TokenUsage(), ending=ENDING_SWEPT) for it in ids]
    assert (await books.book(*swept)).closed == 2000
    amounts = {"req_0007": AMOUNT_NANO_USD, "req_1999": 2 * AMOUNT_NANO_USD}
    many = ListUsageRequest(tenant_id="acme", limit=2000)
    records = (await books.read(lambda it: list_usage(it, many))).records
    costs = {it.event.request_id: it.amount_nano_usd for it in records if it.amount_nano_usd}
    assert costs == amounts


@pytest.mark.parametrize(
    ("told", "output_tokens"), [(["req_1"], 2**32 - 1), (["req_1#0", "req_1#1"], 2**31)]
)
async def test_a_witness_that_cannot_be_true_is_none(
    books: Books, told: list[str], output_tokens: int
) -> None:
    """A broken worker must not stop the log: its count costs too much, or exceeds any number."""
    dear = Price(model=MODEL, output_nano_usd=10**9)
    await books.database.write(lambda it: add_price(it, dear, Stamp(NOW)))
    usage = TokenUsage(prompt_tokens=1, output_tokens=output_tokens)
    await books.book(*(witnessed(it, usage=usage) for it in told))
    swept = closed(usage=TokenUsage(), ending=ENDING_SWEPT)
    swept.price_version = 2
    assert (await books.book(swept)).closed == 1
    assert (await books.read(verify)).ok


async def test_of_a_workers_two_counts_of_a_request_the_fuller_one_stands(books: Books) -> None:
    """It was lost, another worker went on, was lost too, and the first one ended the request."""
    few = TokenUsage(prompt_tokens=100, cached_gpu_tokens=40, output_tokens=3)
    await books.book(witnessed(usage=few), witnessed("req_2"), witnessed("req_2", usage=few))
    await books.book(witnessed(), witnessed("req_2", usage=few))
    swept = [closed(it, usage=TokenUsage(), ending=ENDING_SWEPT) for it in ("req_1", "req_2")]
    await books.book(*swept)
    assert (await books.balances())["receivable:acme"] == 2 * AMOUNT_NANO_USD


async def test_holds_of_a_project_are_found_among_many_others(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound counts those that are asked for, not the tenant's newest of all projects."""
    monkeypatch.setattr("headrace_billing.spend_store.MAX_HOLDS", 2)
    quiet = opened("req_1")
    quiet.project_id = "quiet"
    await books.book(quiet, *(opened(f"req_{number}") for number in range(2, 6)))
    queries = [
        SpendQuery(level=LEVEL_PROJECT, scope_id="quiet"),
        SpendQuery(level=LEVEL_PROJECT, scope_id="default"),
    ]
    asked = GetSpendRequest(tenant_id="acme", queries=queries)
    mine, others = await books.read(lambda it: get_spends(it, asked))
    assert [it.request_id for it in mine.holds] == ["req_1"]
    assert [it.request_id for it in others.holds] == ["req_5", "req_4"]


async def test_all_that_was_spent_is_told_alike_with_and_without_a_window(books: Books) -> None:
    """Totals come from the sums by day, windows from the events; corrections are in both."""
    await books.book(opened(), closed(ending=ENDING_SWEPT, usage=TokenUsage()), closed("req_2"))
    await books.book(closed(), opened("req_3"))
    scopes = [(LEVEL_KEY, "key_1"), (LEVEL_PROJECT, "default"), (LEVEL_TENANT, "acme")]
    queries = [
        SpendQuery(level=level, scope_id=scope_id, to_unix_us=to_us)
        for level, scope_id in [*scopes, (LEVEL_MODEL, f"acme/{MODEL}")]
        for to_us in (0, 2**47 * 1000)
    ]
    asked = GetSpendRequest(tenant_id="acme", queries=queries)
    for spend in await books.read(lambda it: get_spends(it, asked)):
        assert spend.spent_nano_usd == 2 * AMOUNT_NANO_USD
        assert [it.hold_nano_usd for it in spend.holds] == [10_000]
