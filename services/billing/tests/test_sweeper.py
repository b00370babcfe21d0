"""The sweeper closes what nobody closed, never too early."""

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection, select

from headrace_billing import schema, sweeper
from headrace_billing.audit import Stamp
from headrace_billing.bookkeeper import Bookkeeper
from headrace_billing.deliveries import Delivery
from headrace_billing.metrics import BillingMetrics
from headrace_billing.price_store import add_price
from headrace_billing.store import Database
from headrace_billing.sweeper import Sweeper
from headrace_billing.verify import verify
from headrace_common.ids import job_id, new_request_id
from headrace_contracts.billing.v1.billing_pb2 import Price
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import ENDING_SWEPT, UsageEvent, WorkerUsage
from headrace_testing.clock import FakeClock
from headrace_testing.usage_events import AMOUNT_NANO_USD, MODEL, closed, opened, witnessed

GRACE_S = 30.0


class Scene:
    """A sweeper over one database, with a log that has been read to its end for long."""

    def __init__(self, database: Database, clock: FakeClock) -> None:
        self.database, self.clock, self.keeper = database, clock, Bookkeeper("workers")
        self.caught_up_s = 1000.0
        self.registry = CollectorRegistry()
        self.sweeper = Sweeper(
            database,
            self.keeper,
            self.caught_up_for_s,
            clock,
            BillingMetrics(self.registry),
            grace_s=GRACE_S,
            interval_s=1.0,
            witness_days=30,
        )

    async def caught_up_for_s(self) -> float:
        return self.caught_up_s

    async def book(self, *messages: UsageEvent | WorkerUsage) -> None:
        batch = [
            Delivery(
                "workers" if isinstance(it, WorkerUsage) else "usage",
                0,
                idx,
                it.SerializeToString(),
            )
            for idx, it in enumerate(messages)
        ]
        await self.database.write(lambda it: self.keeper.book_batch(it, batch, 1))

    async def entries(self) -> dict[str, int]:
        def read(connection: Connection) -> dict[str, int]:
            query = select(schema.entries.c.request_id, schema.entries.c.amount_nano_usd)
            return dict(connection.execute(query).all())

        return await self.database.read(read)


@pytest.fixture
def scene(database: Database, clock: FakeClock) -> Scene:
    return Scene(database, clock)


async def test_an_open_request_is_closed_after_deadline_and_grace(scene: Scene) -> None:
    """Not a moment before; then it has its one entry and is not open any more."""
    await scene.book(opened(life_s=60))
    scene.clock.advance(60 + GRACE_S - 1)
    assert await scene.sweeper.sweep() == 0
    assert scene.registry.get_sample_value("headrace_billing_open_requests") == 1
    scene.clock.advance(2)
    assert await scene.sweeper.sweep() == 1
    assert await scene.entries() == {"req_1": 0}
    found = await scene.database.read(verify)
    assert (found.ok, found.num_open, found.num_events) == (True, 0, 2)
    assert await scene.sweeper.sweep() == 0


async def test_a_witness_makes_a_swept_request_cost_what_was_made(scene: Scene) -> None:
    """The request with a worker's count is captured, the other voided."""
    await scene.book(witnessed("req_1"), opened("req_1"), opened("req_2"))
    scene.clock.advance(1000)
    assert await scene.sweeper.sweep() == 2
    assert await scene.entries() == {"req_1": AMOUNT_NANO_USD, "req_2": 0}
    query = select(schema.usage_events.c.payload).where(schema.usage_events.c.source == "sweeper")
    payloads = await scene.database.read(lambda it: it.execute(query).scalars().all())
    events = [UsageEvent.FromString(it) for it in payloads]
    assert {it.ending for it in events} == {ENDING_SWEPT}
    assert {it.request_id: it.estimated for it in events} == {"req_1": False, "req_2": True}


async def test_nothing_is_swept_while_the_log_is_behind(scene: Scene) -> None:
    """The close may be on its way: the log must have been at its end for the whole grace."""
    await scene.book(opened())
    scene.clock.advance(1000)
    for caught_up_s in (0.0, GRACE_S - 1):
        scene.caught_up_s = caught_up_s
        assert await scene.sweeper.sweep() == 0
    scene.caught_up_s = GRACE_S
    assert await scene.sweeper.sweep() == 1


async def test_a_real_close_after_the_sweep_is_made_up_for(scene: Scene) -> None:
    """By an entry of its own; and it is a finding."""
    await scene.book(opened())
    scene.clock.advance(1000)
    await scene.sweeper.sweep()
    await scene.book(closed())
    assert await scene.entries() == {"req_1": 0, "req_1:correction": AMOUNT_NANO_USD}
    found = await scene.database.read(verify)
    assert found.ok
    assert "late_close" in found.problems[0]


async def test_more_than_one_round_is_swept_at_once(scene: Scene) -> None:
    """A gateway with many running requests may die."""
    await scene.book(*(opened(f"req_{i:03d}") for i in range(450)))
    scene.clock.advance(1000)
    assert await scene.sweeper.sweep() == 450
    found = await scene.database.read(verify)
    assert (found.ok, found.num_open) == (True, 0)
    booked = scene.registry.get_sample_value(
        "headrace_billing_events_booked_total", {"kind": "closed", "source": "sweeper"}
    )
    assert booked == 450


async def test_old_counts_of_workers_are_deleted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a request's several prompts too; none while what they are for is still open."""
    monkeypatch.setattr(sweeper, "_MAX_FORGOTTEN_AT_ONCE", 2)
    old = new_request_id(scene.clock)
    counts = [witnessed(job_id(old, idx)) for idx in range(3)]
    await scene.book(*counts, witnessed(f"{old}.1"), opened(old))
    scene.clock.advance(29 * 86_400)
    young = new_request_id(scene.clock)
    await scene.book(witnessed(young))
    scene.clock.advance(2 * 86_400)
    query = select(schema.worker_usage.c.request_id)

    async def kept() -> set[str]:
        return set(await scene.database.read(lambda it: it.execute(query).scalars().all()))

    scene.caught_up_s = 0.0
    await scene.sweeper.sweep()
    assert len(await kept()) == 5
    scene.caught_up_s = GRACE_S
    assert await scene.sweeper.sweep() == 1
    assert await kept() == {young}
    assert (await scene.entries())[old] == 3 * AMOUNT_NANO_USD


async def test_a_count_that_cannot_be_true_holds_up_no_other_request(scene: Scene) -> None:
    """One worker's nonsense must not end all sweeping: its request is closed without it."""
    dear = Price(model=MODEL, output_nano_usd=10**9)
    await scene.database.write(lambda it: add_price(it, dear, Stamp(1)))
    nonsense = TokenUsage(prompt_tokens=1, output_tokens=2**32 - 1)
    first = opened()
    first.price_version = 2
    await scene.book(witnessed(usage=nonsense), first, witnessed("req_2"), opened("req_2"))
    scene.clock.advance(1000)
    assert await scene.sweeper.sweep() == 2
    assert await scene.entries() == {"req_1": 0, "req_2": AMOUNT_NANO_USD}
