"""From arrival to end: queueing, release, cancellation."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from random import Random
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.errors import HeadraceError, NoReplica, QueueFull
from headrace_common.lifecycle import cancel_and_wait
from headrace_contracts.router.v1.router_pb2 import PickProgress
from headrace_router.candidate import BATCH, HIGH
from headrace_router.desk import PickDesk, Ticket
from headrace_router.dispatcher import Dispatcher, PendingPick
from headrace_router.metrics import RouterMetrics
from headrace_router.policy_file import PolicyFile, PolicyName
from headrace_testing.waiting import eventually

LONG = 1000


@pytest.fixture
def make_dispatcher(fleet):
    def make(**sections: object) -> Dispatcher:
        file = PolicyFile.model_validate({"version": 1} | sections)
        metrics = RouterMetrics(CollectorRegistry())
        desk = PickDesk(
            fleet.pipeline,
            fleet.loads,
            fleet.predictor,
            fleet.decode,
            file,
            fleet.clock,
            Random(1),
            metrics,
        )
        fleet.table.on_change(desk.notice_change)
        return Dispatcher(desk, fleet.clock)

    return make


@pytest.fixture
async def dispatcher(make_dispatcher) -> AsyncIterator[Dispatcher]:
    dispatcher = make_dispatcher()
    running = asyncio.create_task(dispatcher.run())
    yield dispatcher
    await cancel_and_wait(running)


def picked(ticket: PendingPick) -> str:
    return ticket.picked.result().chosen.key.worker_id


async def test_an_idle_fleet_picks_at_once(fleet, ask, make_dispatcher) -> None:
    """Without any pass over the queues."""
    fleet.add("w1")
    dispatcher = make_dispatcher()
    ticket = dispatcher.submit(ask(), None)
    assert picked(ticket) == "w1"
    assert fleet.loads.num_requests() == 1
    ticket.close()
    ticket.close()
    assert fleet.loads.num_requests() == 0


async def test_an_ended_pick_leaves_nothing_to_the_collector(fleet, ask, make_dispatcher) -> None:
    """Picked at once or queued before: with the collector off nothing of it stays."""
    fleet.add("w1")
    dispatcher = make_dispatcher()
    gc.disable()
    try:
        tickets = [dispatcher.submit(ask(LONG), None) for _ in range(2)]
        assert [it.picked.done() for it in tickets] == [True, False]
        seen = [weakref.ref(it) for it in tickets]
        while tickets:
            tickets.pop().close()
        await asyncio.sleep(0)
        assert [it() for it in seen] == [None, None]
    finally:
        gc.enable()


async def test_the_first_token_of_one_lets_the_next_go(fleet, ask, dispatcher) -> None:
    """While its prompt is computed the replica gets nothing new; then it does, though it runs."""
    fleet.add("w1")
    first = dispatcher.submit(ask(LONG), None)
    second = dispatcher.submit(ask(LONG), None)
    await asyncio.sleep(0.02)
    assert not second.picked.done()
    first.progress(PickProgress(first_token=True, ttft_s=1.0))
    await eventually(second.picked.done)
    assert fleet.loads.num_requests() == 2
    first.close()
    second.close()


async def test_a_newcomer_takes_no_turn_of_another_tenant(fleet, ask, dispatcher) -> None:
    """Who sends the next request as soon as one ends would find every opening first."""
    fleet.add("w1")
    first = dispatcher.submit(ask(LONG, tenant_id="flood"), None)
    small = dispatcher.submit(ask(tenant_id="small"), None)
    await asyncio.sleep(0.02)
    assert not small.picked.done()
    first.close()
    newcomer = dispatcher.submit(ask(LONG, tenant_id="flood"), None)
    assert not newcomer.picked.done()
    await eventually(small.picked.done)
    small.close()
    await eventually(newcomer.picked.done)
    newcomer.close()


async def test_a_newcomer_takes_an_opening_from_a_lower_class(fleet, ask, dispatcher) -> None:
    """At once: batch work runs in the gaps."""
    fleet.add("w1")
    first = dispatcher.submit(ask(LONG, tenant_id="flood"), None)
    batch = dispatcher.submit(ask(tenant_id="small", priority=BATCH), None)
    await asyncio.sleep(0.02)
    first.close()
    newcomer = dispatcher.submit(ask(LONG, tenant_id="flood"), None)
    assert newcomer.picked.done()
    assert not batch.picked.done()
    newcomer.close()
    await eventually(batch.picked.done)
    batch.close()


@pytest.mark.parametrize("how", ["end", "report"])
async def test_an_end_or_a_report_lets_the_next_go(fleet, ask, dispatcher, how: str) -> None:
    """A lost first-token message does not hold the queue for ever."""
    key = fleet.add("w1")
    first = dispatcher.submit(ask(LONG), None)
    second = dispatcher.submit(ask(LONG), None)
    fleet.clock.advance(1.0)
    if how == "end":
        first.close()
    else:
        fleet.report(key, num_running=1)
    await eventually(second.picked.done)
    first.close()
    second.close()
    assert fleet.loads.num_requests() == 0


async def test_cancelled_in_the_queue_is_gone(fleet, ask, dispatcher) -> None:
    """It takes no replica and leaves no load."""
    fleet.add("w1")
    first = dispatcher.submit(ask(LONG), None)
    second = dispatcher.submit(ask(LONG), None)
    second.close()
    first.close()
    await asyncio.sleep(0.02)
    assert fleet.loads.num_requests() == 0
    assert second.picked.cancelled()


async def test_cancelled_in_the_moment_of_the_pick_gives_the_load_back(
    fleet, ask, make_dispatcher
) -> None:
    """The pick has happened, the caller does not know it yet, and leaves."""
    fleet.add("w1")
    dispatcher = make_dispatcher()
    first = dispatcher.submit(ask(LONG), None)
    second = dispatcher.submit(ask(LONG), None)

    async def caller() -> None:
        try:
            await second.picked
        finally:
            second.close()

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    first.close()
    dispatcher.desk.release_all()
    assert fleet.loads.num_requests() == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fleet.loads.num_requests() == 0


async def test_a_storm_of_cancellations_leaves_nothing(fleet, ask, dispatcher) -> None:
    """Hundreds of requests, cancelled at any point of their life, release exactly once each."""
    for idx in range(3):
        fleet.add(f"w{idx}")
    random = Random(7)
    peak = 0

    async def request(number: int) -> None:
        ticket = dispatcher.submit(ask(LONG, chain=(number % 5,), tenant_id=f"t{number % 4}"), None)
        try:
            await ticket.picked
            await asyncio.sleep(random.random() * 0.01)
            ticket.progress(PickProgress(first_token=True, ttft_s=0.5, output_tokens=3))
            await asyncio.sleep(random.random() * 0.01)
            ticket.progress(PickProgress(output_tokens=9))
        finally:
            ticket.close()

    tasks = [asyncio.create_task(request(number)) for number in range(300)]
    for task in random.sample(tasks, 200):
        await asyncio.sleep(random.random() * 0.002)
        peak = max(peak, fleet.loads.num_requests())
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert peak > 1
    assert fleet.loads.num_requests() == 0
    assert fleet.loads.in_flight.num_entries() == 0
    for idx in range(3):
        key = fleet.table.get(f"w{idx}").key
        assert fleet.loads.load(key, None) == (0, 0, 0, 0)


async def test_waiting_has_an_end(fleet, ask, dispatcher) -> None:
    """The request's own bound, then QueueFull with a time to come back."""
    fleet.add("w1")
    first = dispatcher.submit(ask(LONG), None)
    second = dispatcher.submit(ask(LONG), 0.5)
    fleet.clock.advance(0.6)
    dispatcher.desk.notice_change()
    with pytest.raises(QueueFull) as caught:
        await second.picked
    assert caught.value.retry_after_s >= 1.0
    first.close()
    second.close()


async def test_waiting_for_nobody_ends_at_once(fleet, ask, dispatcher) -> None:
    """When the last replica is lost, those who wait for it are told."""
    fleet.add("w1")
    first = dispatcher.submit(ask(LONG), None)
    second = dispatcher.submit(ask(LONG), None)
    fleet.table.lose("w1")
    with pytest.raises(NoReplica):
        await asyncio.wait_for(second.picked, 2)
    first.close()
    second.close()


async def test_the_queue_is_bounded(fleet, ask, make_dispatcher) -> None:
    """The newcomer, or somebody less important, is refused."""
    fleet.add("w1")
    dispatcher = make_dispatcher(queue={"max_waiting_per_model": 1})
    tickets = [dispatcher.submit(ask(LONG), None)]
    tickets.append(dispatcher.submit(ask(LONG, priority=BATCH), None))
    with pytest.raises(QueueFull):
        dispatcher.submit(ask(LONG, priority=BATCH), None)
    tickets.append(dispatcher.submit(ask(LONG, priority=HIGH), None))
    with pytest.raises(QueueFull):
        await tickets[1].picked
    for ticket in tickets:
        ticket.close()


def test_of_a_burst_the_short_ones_go_first(fleet, ask, make_dispatcher) -> None:
    """Long work that finds an opening on a busy replica waits some milliseconds; short does not."""
    key = fleet.add("w1")
    fleet.loads.book(key, (), uncached_tokens=0, prompt_tokens=10, now_s=fleet.clock.now_s())
    gone: list[int] = []
    desk = make_dispatcher().desk

    def submit(tokens: int) -> Ticket:
        return desk.submit(ask(tokens), None, lambda _: gone.append(tokens))

    tickets = [submit(8 * LONG), submit(LONG // 2), submit(2 * LONG), submit(LONG // 20)]
    desk.release_all()
    assert gone == [LONG // 20]
    look_s = desk.next_look_s()
    assert look_s is not None
    assert 0 < look_s <= 0.005
    tickets[3].progress(PickProgress(first_token=True, ttft_s=0.05))
    fleet.clock.advance(look_s)
    desk.release_all()
    assert gone == [LONG // 20, LONG // 2]
    assert desk.next_look_s() is None
    for ticket in tickets:
        ticket.close()


def test_long_work_goes_at_once_where_nothing_runs(fleet, ask, make_dispatcher) -> None:
    """There is nobody to wait for."""
    fleet.add("w1")
    ticket = make_dispatcher().desk.submit(ask(8 * LONG), None, lambda _: None)
    assert ticket.guard is not None
    ticket.close()


async def test_a_new_prompt_follows_the_one_under_way(fleet, ask, dispatcher) -> None:
    """Eight equal prompts, two replicas: all go where the first one computes the prefix."""
    fleet.add("w1")
    fleet.add("w2")
    query = ask(LONG, chain=tuple(range(1, 62)))
    tickets = [dispatcher.submit(query, None) for _ in range(8)]
    tickets[0].progress(PickProgress(first_token=True, ttft_s=1.0))
    for ticket in tickets:
        await asyncio.wait_for(asyncio.shield(ticket.picked), 2)
        ticket.progress(PickProgress(first_token=True, ttft_s=0.1))
    assert len({picked(ticket) for ticket in tickets}) == 1
    for ticket in tickets:
        ticket.close()


async def test_unknown_models_are_not_remembered(fleet, ask, make_dispatcher) -> None:
    """Names come from callers: they must not fill memory."""
    fleet.add("w1")
    dispatcher = make_dispatcher()
    for number in range(50):
        with pytest.raises(HeadraceError):
            dispatcher.submit(ask(model=f"no-such-{number}"), None)
    assert dispatcher.desk._policies == {}
    assert dispatcher.desk._queues == {}


@pytest.mark.parametrize("policy", sorted(set(get_args(PolicyName)) - {"hold"}))
async def test_other_policies_by_name(fleet, ask, make_dispatcher, policy: str) -> None:
    """They release at once, and wait only for room."""
    key = fleet.add("w1")
    dispatcher = make_dispatcher(pick={"policy": policy})
    tickets = [dispatcher.submit(ask(LONG), None) for _ in range(3)]
    assert [picked(ticket) for ticket in tickets] == ["w1"] * 3
    assert tickets[0].picked.result().policy.name == policy
    fleet.report(key, max_requests=3)
    tickets.append(dispatcher.submit(ask(LONG), None))
    assert not tickets[3].picked.done()
    tickets[0].close()
    dispatcher.desk.release_all()
    assert tickets[3].picked.done()
    for ticket in tickets:
        ticket.close()


async def test_batch_that_cannot_be_served_in_time_is_refused_at_once(
    fleet, ask, make_dispatcher
) -> None:
    """It comes back later; what somebody waits for queues."""
    key = fleet.add("w1")
    dispatcher = make_dispatcher(queue={"max_batch_ttft_s": 5.0})
    fleet.report(key, queued_prefill_tokens=6 * 1000)
    with pytest.raises(QueueFull) as caught:
        dispatcher.submit(ask(LONG, priority=BATCH), None)
    assert caught.value.retry_after_s >= 1.0
    tickets = [dispatcher.submit(ask(LONG), None)]
    fleet.report(key, queued_prefill_tokens=3 * 1000)
    tickets.append(dispatcher.submit(ask(LONG, priority=BATCH), None))
    assert not any(ticket.picked.done() for ticket in tickets)
    for ticket in tickets:
        ticket.close()


async def test_another_policy_file_is_used_from_the_next_decision_on(
    fleet, ask, make_dispatcher
) -> None:
    """Requests that hold load or wait are not lost by it."""
    fleet.add("w1")
    dispatcher = make_dispatcher()
    first, second = dispatcher.submit(ask(LONG), None), dispatcher.submit(ask(LONG), None)
    assert not second.picked.done()
    file = PolicyFile.model_validate({"version": 1, "pick": {"policy": "random"}})
    dispatcher.desk.use(file)
    dispatcher.desk.release_all()
    assert second.picked.result().policy.name == "random"
    for ticket in (first, second):
        ticket.close()
    assert fleet.loads.num_requests() == 0


async def test_a_hot_prefix_spreads_while_its_holder_generates(fleet, ask, make_dispatcher) -> None:
    """Forty at once with one prefix: both replicas work. One at a time: the warm one."""
    for name in ("w1", "w2"):
        key = fleet.add(name)
        fleet.report(key, decode_step_streams=1.0, decode_step_s=0.015)
        fleet.report(key)
    query = ask(420, chain=tuple(range(1, 26)), expected_output_tokens=48)
    fresh = fleet.mirror.begin("m", 1)
    fleet.mirror.add(fresh, 1, range(1, 26))
    fleet.mirror.commit(fleet.table.get("w1").key, fresh)
    dispatcher = make_dispatcher()
    for _ in range(3):
        alone = dispatcher.submit(query, None)
        assert picked(alone) == "w1"
        alone.close()
    tickets = [dispatcher.submit(query, None) for _ in range(40)]
    for _ in range(100):
        for ticket in tickets:
            if ticket.picked.done():
                ticket.progress(PickProgress(first_token=True, ttft_s=0.1))
        dispatcher.desk.release_all()
    share = sum(picked(ticket) == "w1" for ticket in tickets) / len(tickets)
    assert 0.2 <= share <= 0.8
    for ticket in tickets:
        ticket.close()
