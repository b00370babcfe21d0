"""The ledger against a plain count, step by step, on a simulated clock.

Requests open and close, events are delivered again and late, consumers crash before and after their
commit, prices change, workers witness, the sweeper runs, credits are granted, invoices issued and
corrected. After every step the books must verify, and agree with plain dictionaries.
"""

import asyncio
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection, select

from headrace_billing import credit_store, invoice_store, price_store, schema, tenant_store
from headrace_billing.audit import Stamp
from headrace_billing.bookkeeper import Bookkeeper
from headrace_billing.deliveries import Delivery
from headrace_billing.metrics import BillingMetrics
from headrace_billing.store import Database
from headrace_billing.sweeper import Sweeper
from headrace_billing.verify import verify
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_testing.clock import FakeClock
from headrace_testing.usage_events import MODEL, closed, opened, witnessed

TENANTS = ("acme", "zeta")
LIFE_S, GRACE_S = 60.0, 30.0
FIRST_PRICES = (20, 2, 60)


class CrashError(Exception):
    """The consumer died before its commit."""


class LedgerMachine(RuleBasedStateMachine):
    """Real books in a SQLite file; `spent` and `credited` are the oracle."""

    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-machine-"))
        shutil.copy(self.template, self.folder / "ledger.db")
        self.clock = FakeClock()
        self.keeper = Bookkeeper("workers")
        self.offset = 0
        self.delivered: list[UsageEvent] = []
        # request -> (tenant, price version, when it is swept)
        self.open: dict[str, tuple[str, int, float]] = {}
        self.witnessed: dict[str, int] = {}
        # request -> (tenant, price version, tokens as swept)
        self.swept: dict[str, tuple[str, int, tuple[int, int, int]]] = {}
        self.entries: dict[str, int] = {}
        self.spent = dict.fromkeys(TENANTS, 0)
        self.credited = dict.fromkeys(TENANTS, 0)
        self.billed = dict.fromkeys(TENANTS, 0)
        self.prices = [FIRST_PRICES]
        self.invoices: list[pb.Invoice] = []

    @initialize()
    def prepare(self) -> None:
        """Two tenants."""
        self.database = Database(f"sqlite:///{self.folder}/ledger.db")
        metrics = BillingMetrics(CollectorRegistry())

        async def long_caught_up() -> float:
            return 1e6

        self.sweeper = Sweeper(
            self.database,
            self.keeper,
            long_caught_up,
            self.clock,
            metrics,
            grace_s=GRACE_S,
            interval_s=1.0,
            witness_days=30,
        )
        for tenant in TENANTS:
            self.write(lambda it, name=tenant: tenant_store.ensure_tenant(it, name, "", self.by()))

    def by(self) -> Stamp:
        return Stamp(int(self.clock.unix_s()))

    def write(self, work):  # type: ignore[no-untyped-def]
        return self.runner.run(self.database.write(work))

    def read(self, work):  # type: ignore[no-untyped-def]
        return self.runner.run(self.database.read(work))

    def deliver(self, *messages: object) -> None:
        batch = []
        for message in messages:
            topic = "usage" if isinstance(message, UsageEvent) else "workers"
            batch.append(Delivery(topic, 0, self.offset, message.SerializeToString()))  # type: ignore[attr-defined]
            self.offset += 1
        self.write(lambda it: self.keeper.book_batch(it, batch, self.by().unix_s))
        self.delivered += [it for it in messages if isinstance(it, UsageEvent)]

    def enter(
        self, request_id: str, tenant: str, version: int, tokens: tuple[int, int, int]
    ) -> None:
        """Count a terminal entry in the oracle, once."""
        if request_id in self.entries:
            return
        amount = self.amount_of(version, tokens)
        self.entries[request_id] = amount
        self.spent[tenant] += amount
        self.open.pop(request_id, None)

    def amount_of(self, version: int, tokens: tuple[int, int, int]) -> int:
        prompt, cached, output = tokens
        price = self.prices[version - 1]
        return (prompt - cached) * price[0] + cached * price[1] + output * price[2]

    @rule(tenant=st.sampled_from(TENANTS))
    def open_request(self, tenant: str) -> None:
        """A request is admitted under the newest prices."""
        request_id = f"req_{len(self.delivered):04d}_{len(self.open)}"
        at_us = round(self.clock.unix_s() * 1e6)
        event = opened(request_id, tenant, at_unix_us=at_us, life_s=LIFE_S)
        event.price_version = len(self.prices)
        self.open[request_id] = (tenant, len(self.prices), self.clock.unix_s() + LIFE_S + GRACE_S)
        self.deliver(event)

    @rule(data=st.data(), prompt=st.integers(0, 300), output=st.integers(0, 50))
    def close_request(self, data: st.DataObject, prompt: int, output: int) -> None:
        """Any open request ends."""
        if not self.open:
            return
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        tenant, version, _ = self.open[request_id]
        cached = data.draw(st.integers(0, prompt))
        usage = TokenUsage(prompt_tokens=prompt, cached_gpu_tokens=cached, output_tokens=output)
        at_us = round(self.clock.unix_s() * 1e6)
        event = closed(request_id, tenant, usage=usage, at_unix_us=at_us)
        event.price_version, event.duration_s = version, 0.0
        self.deliver(event)
        self.enter(request_id, tenant, version, (prompt, cached, output))

    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        """The log repeats itself, in any order."""
        if self.delivered:
            again = data.draw(st.lists(st.sampled_from(self.delivered), max_size=5))
            before = list(self.delivered)
            self.deliver(*again)
            self.delivered = before

    @rule(data=st.data())
    def crash_before_commit(self, data: st.DataObject) -> None:
        """A consumer dies with its batch booked and not committed: nothing of it is there."""
        if not self.delivered:
            return
        event = data.draw(st.sampled_from(self.delivered))

        def die(connection: Connection) -> None:
            fresh = closed(f"{event.request_id}_lost", event.tenant_id)
            delivery = Delivery("usage", 0, self.offset, fresh.SerializeToString())
            self.keeper.book_batch(connection, [delivery], 1)
            raise CrashError

        with pytest.raises(CrashError):
            self.write(die)

    @rule(data=st.data(), output=st.integers(1, 50))
    def witness(self, data: st.DataObject, output: int) -> None:
        """A worker says what it did for a request that nobody closed."""
        waiting = sorted(set(self.open) - set(self.witnessed))
        if waiting:
            request_id = data.draw(st.sampled_from(waiting))
            self.witnessed[request_id] = output
            usage = TokenUsage(prompt_tokens=10, output_tokens=output)
            self.deliver(witnessed(request_id, usage=usage))

    @rule(seconds=st.sampled_from([1, 45, 100, 86_400]))
    def wait_and_sweep(self, seconds: float) -> None:
        """Time passes; what is past deadline and grace is closed by the worker's count, or by 0."""
        self.clock.advance(seconds)
        self.runner.run(self.sweeper.sweep())
        now = self.clock.unix_s()
        for request_id, (tenant, version, due_s) in list(self.open.items()):
            if due_s < now - 1e-3:
                output = self.witnessed.get(request_id)
                tokens = (10, 0, output) if output is not None else (0, 0, 0)
                self.enter(request_id, tenant, version, tokens)
                self.swept[request_id] = (tenant, version, tokens)

    @rule(data=st.data(), prompt=st.integers(0, 300), output=st.integers(0, 50))
    def close_after_the_sweep(self, data: st.DataObject, prompt: int, output: int) -> None:
        """The gateway was alive after all: the difference is booked, once."""
        if not self.swept:
            return
        request_id = data.draw(st.sampled_from(sorted(self.swept)))
        tenant, version, before = self.swept.pop(request_id)
        usage = TokenUsage(prompt_tokens=prompt, output_tokens=output)
        event = closed(request_id, tenant, usage=usage)
        event.price_version = version
        self.deliver(event, event)
        tokens = (prompt, 0, output)
        if tokens != before:
            more = self.amount_of(version, tokens) - self.amount_of(version, before)
            self.entries[f"{request_id}:correction"] = more
            self.spent[tenant] += more

    @rule(prices=st.tuples(st.integers(0, 90), st.integers(0, 9), st.integers(0, 90)))
    def set_price(self, prices: tuple[int, int, int]) -> None:
        """Requests under way keep theirs."""
        price = pb.Price(
            model=MODEL,
            input_nano_usd=prices[0],
            cached_input_nano_usd=prices[1],
            output_nano_usd=prices[2],
        )
        self.write(lambda it: price_store.add_price(it, price, self.by()))
        self.prices.append(prices)

    @rule(tenant=st.sampled_from(TENANTS), number=st.integers(0, 3), repeats=st.integers(1, 2))
    def grant_credit(self, tenant: str, number: int, repeats: int) -> None:
        """Once per id, whoever repeats it."""
        request = pb.GrantCreditRequest(
            tenant_id=tenant, credit_id=f"c{number}", amount_nano_usd=1000 + number
        )
        known = self.read(lambda it: credit_store.list_credits(it, tenant))
        for _ in range(repeats):
            self.write(lambda it: credit_store.grant_credit(it, request, self.by()))
        if f"c{number}" not in {it.credit_id for it in known}:
            self.credited[tenant] += 1000 + number

    @rule(tenant=st.sampled_from(TENANTS))
    def issue_invoice(self, tenant: str) -> None:
        """Bills what no invoice holds; a second time on one day is the first again."""
        day = self.clock_day()
        request = pb.IssueInvoiceRequest(tenant_id=tenant, period=day)
        issued = self.write(lambda it: invoice_store.issue_invoice(it, request, self.by()))
        if issued.invoice_id not in {it.invoice_id for it in self.invoices}:
            self.invoices.append(issued)
            self.billed[tenant] += issued.total_nano_usd
            assert self.billed[tenant] == self.spent[tenant]

    def clock_day(self) -> str:
        return datetime.fromtimestamp(self.clock.unix_s(), UTC).date().isoformat()

    @rule(data=st.data(), number=st.integers(0, 2))
    def correct_invoice(self, data: st.DataObject, number: int) -> None:
        """By a counter-entry; what was issued stays as it was."""
        worth = [it for it in self.invoices if it.total_nano_usd > 100 * (number + 1)]
        if not worth:
            return
        invoice = data.draw(st.sampled_from(worth))
        request = pb.CorrectInvoiceRequest(
            invoice_id=invoice.invoice_id,
            correction_id=f"{invoice.invoice_id}-{number}",
            amount_nano_usd=1,
        )
        before = self.read(lambda it: credit_store.credits_of(it, invoice.tenant_id))
        self.write(lambda it: invoice_store.correct_invoice(it, request, self.by()))
        after = self.read(lambda it: credit_store.credits_of(it, invoice.tenant_id))
        assert after - before in (0, 1)
        self.credited[invoice.tenant_id] += after - before

    @invariant()
    def books_are_right(self) -> None:
        """They verify, and say what the oracle says."""
        if not hasattr(self, "database"):
            return

        def look(connection: Connection):  # type: ignore[no-untyped-def]
            return (
                verify(connection),
                connection.execute(select(schema.entries)).all(),
                [credit_store.balance(connection, name) for name in TENANTS],
                [invoice_store.get_invoice(connection, it.invoice_id) for it in self.invoices],
            )

        found, rows, balances, invoices = self.read(look)
        assert found.ok, found.problems
        assert found.postings_sum_nano_usd == 0
        assert found.num_open == len(self.open)
        assert {row.request_id: row.amount_nano_usd for row in rows} == self.entries
        for balance in balances:
            assert balance.spent_nano_usd == self.spent[balance.tenant_id]
            assert balance.credits_nano_usd == self.credited[balance.tenant_id]
        assert invoices == self.invoices

    def teardown(self) -> None:
        """Close and delete."""
        if hasattr(self, "database"):
            self.runner.run(self.database.close())
        self.runner.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.timeout(300)
def test_the_books_follow_from_what_happened(migrated_file: Path) -> None:
    """Whatever happens in whatever order."""
    LedgerMachine.template = migrated_file
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(max_examples=8, stateful_step_count=15),
    )
