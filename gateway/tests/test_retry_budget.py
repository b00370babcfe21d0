"""How many retries there may be, and how soon."""

from __future__ import annotations

from headrace_gateway.retry_budget import RetryBudget, RetryLimits
from headrace_testing.clock import FakeClock
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet, chat_body

LIMITS = RetryLimits(ratio=0.2, floor_per_s=0.5, burst=2.0)


def test_requests_pay_for_retries(clock: FakeClock) -> None:
    """A fifth each, beside a trickle by time; no more is saved up than the burst."""
    budget = RetryBudget(LIMITS, clock, lambda: 0.5)
    assert [budget.try_take() for _ in range(3)] == [True, True, False]
    for _ in range(5):
        budget.add_request()
    assert [budget.try_take() for _ in range(2)] == [True, False]
    clock.advance(2.0)
    assert [budget.try_take() for _ in range(2)] == [True, False]
    clock.advance(1000.0)
    assert [budget.try_take() for _ in range(3)] == [True, True, False]


def test_waits_are_drawn_below_a_bound_that_doubles(clock: FakeClock) -> None:
    """Full jitter, so that those that failed together do not come back together."""
    budget = RetryBudget(LIMITS, clock, lambda: 0.5)
    waits = [budget.wait_s(failures) for failures in (1, 2, 3, 50)]
    assert waits == [0.01, 0.02, 0.04, 0.5]


async def test_a_fleet_in_trouble_is_not_asked_again_and_again(fleet_parts: GatewayFleet) -> None:
    """Once the budget is gone, a failure is told at once; a stream under way still goes on."""
    fleet_parts.settings |= {"retry_burst": 1.0, "retry_ratio": 0.0, "retry_floor_per_s": 0.0}
    await fleet_parts.start(2)
    try:
        first, second = (server.worker for server in fleet_parts.workers)
        first.switches.die_after_tokens = second.switches.die_after_tokens = 0
        async with fleet_parts.http() as client:
            for num_asked in (2, 3, 4):
                answer = await client.post("/v1/chat/completions", json=chat_body())
                assert answer.status_code == 503
                assert len(first.requests) + len(second.requests) == num_asked
            first.switches.die_after_tokens = second.switches.die_after_tokens = None
            fleet_parts.workers[0].worker.switches.die_after_tokens = 5
            for _ in range(2):
                answer = await client.post("/v1/chat/completions", json=chat_body())
                assert answer.status_code == 200, answer.text
        metrics = fleet_parts.gateway.metrics
        assert metrics.retries.labels("made").value == 1
        assert metrics.retries.labels("refused").value == 3
    finally:
        await fleet_parts.close()


async def test_embeddings_are_tried_again_within_the_budget(fleet_parts: GatewayFleet) -> None:
    """By the same bucket: one retry is saved up, then a request asks one replica alone."""
    fleet_parts.settings |= {"retry_ratio": 0.0, "retry_floor_per_s": 0.0, "retry_burst": 1.0}
    await fleet_parts.start(2)
    try:
        workers = [it.worker for it in fleet_parts.workers]
        for worker in workers:
            worker.switches.refuse = True
        async with fleet_parts.http() as client:
            for num_asked in (2, 3, 4):
                answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
                assert answer.status_code == 503
                assert sum(len(it.embed_requests) for it in workers) == num_asked
    finally:
        await fleet_parts.close()
