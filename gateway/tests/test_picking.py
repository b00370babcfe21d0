"""What the gateway asks the router, and what it does without one."""

from __future__ import annotations

import asyncio

from headrace_common.errors import Internal, QueueFull
from headrace_testing.gateway_answers import ask, degraded
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually


async def test_router_down_falls_back_to_the_last_list(fleet_of_two: GatewayFleet) -> None:
    """Requests go on, to the least loaded of the replicas last seen, and are counted."""
    fleet = fleet_of_two
    await fleet.router_server.kill()
    answers = await asyncio.gather(*(ask(fleet) for _ in range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert all(server.worker.requests for server in fleet.workers)
    assert degraded(fleet, "router") == 4


async def test_a_refusal_of_the_router_is_the_clients(fleet: GatewayFleet) -> None:
    """A full queue is no outage: it is told, not worked around."""
    fleet.router.refuse_with = QueueFull("The queue is full.", retry_after_s=2.5)
    answer = await ask(fleet)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert fleet.worker.requests == []


async def test_a_broken_router_is_worked_around(fleet: GatewayFleet) -> None:
    """An internal error there is an outage."""
    fleet.router.refuse_with = Internal()
    assert (await ask(fleet)).status_code == 200


async def test_the_pick_carries_prompt_and_progress(fleet: GatewayFleet) -> None:
    """Block hashes, size, tenant; the first token is reported; load comes back."""
    await ask(fleet, content="water " * 20, prompt_cache_key="s1", max_tokens=7)
    (pick,) = fleet.router.picks
    request = fleet.worker.requests[0]
    assert pick.prompt_tokens == len(request.prompt_token_ids)
    assert len(pick.block_hashes) == pick.prompt_tokens // 16 * 16
    assert (pick.tenant_id, pick.session_id) == ("acme", "s1")
    assert pick.expected_output_tokens == 7
    await eventually(lambda: fleet.router.progress)
    await fleet.settled()


async def test_long_outputs_are_told_to_the_router(fleet: GatewayFleet) -> None:
    """Now and then, cumulative: fairness and decode load are counted by it."""
    await ask(fleet, content="water", max_tokens=70)
    await eventually(
        lambda: any(m.output_tokens >= 32 for told in fleet.router.progress.values() for m in told)
    )
    await fleet.settled()


async def test_no_ready_replica_is_not_ready(fleet: GatewayFleet) -> None:
    """/ready says 503 when the last replica leaves; the model stays known."""
    fleet.router.set_reachable("w0", False)

    async def is_not_ready() -> bool:
        async with fleet.http() as client:
            return (await client.get("/ready")).status_code == 503

    await eventually(is_not_ready)
    assert (await ask(fleet)).status_code == 503
