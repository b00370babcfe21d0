"""The rate limiter's process killed or frozen under two gateways, with a real Redis behind it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Limits
from headrace_gateway.app import Gateway
from headrace_gateway.clients.ratelimit import RateLimitClient
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually, free_port

pytestmark = pytest.mark.redis
BUDGET_NANO_USD = 10**12


def limiter_process(folder: Path, redis_url: str) -> LocalServer:
    port = free_port()
    settings = {
        "LISTEN": f"127.0.0.1:{port}",
        "METRICS_LISTEN": "127.0.0.1:0",
        "REDIS_URL": redis_url,
        "REDIS_TIMEOUT_S": "2",
    }
    variables = [f"HEADRACE_RATELIMIT_{name}={value}" for name, value in settings.items()]
    command = ["env", *variables, sys.executable, "-m", "headrace_ratelimit"]
    return LocalServer(command, port, folder)


class Rig:
    """Two gateways over one rate limiter that is a process of its own."""

    def __init__(self, fleet: GatewayFleet, other: Gateway, limiter: LocalServer) -> None:
        self.fleet, self.limiter = fleet, limiter
        self.gateways = [fleet.gateway, other]

    def key(self, **fields: Any) -> str:
        api_key, self.last_key = self.fleet.new_key(**fields)
        return api_key

    async def ask(self, api_key: str, number: int = 0) -> httpx.Response:
        url = f"http://127.0.0.1:{self.gateways[number % 2].port}"
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
            return await client.post("/v1/chat/completions", json=chat_body(max_tokens=4))

    def are_away(self) -> list[float | None]:
        name = "headrace_gateway_limiter_away"
        return [it.registry.get_sample_value(name) for it in self.gateways]

    async def spent(self) -> int:
        """What Redis has of the last key's budget, held money included."""
        client = RateLimitClient(f"127.0.0.1:{self.limiter.port}", 5)
        limits = Limits(total_budget_nano_usd=BUDGET_NANO_USD)
        scope = pb.Scope(level=pb.LEVEL_KEY, scope_id=self.last_key.key_id, limits=limits)
        request = pb.AdmitRequest(tenant_id=self.last_key.tenant_id, scopes=[scope], peek=True)
        try:
            return BUDGET_NANO_USD - (await client.admit(request)).states[0].remaining
        finally:
            await client.close()


@pytest.fixture
async def rig(redis_db_url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    limiter = limiter_process(tmp_path, redis_db_url)
    limiter.start()
    address = f"127.0.0.1:{limiter.port}"
    fleet = GatewayFleet(tmp_path, settings={"ratelimit_address": address, "num_replicas": 2})
    try:
        await fleet.start()
        yield Rig(fleet, await fleet.add_gateway(), limiter)
    finally:
        await fleet.close()
        limiter.kill()


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_an_outage_of_the_limiter_is_no_hole_in_the_limits(rig: Rig, how: str) -> None:
    """Rates go by shares of what was left, prepaid money waits, and what was spent is booked."""
    prepaid = rig.key(prepaid=True, limits=Limits(total_budget_nano_usd=BUDGET_NANO_USD))
    limits = Limits(requests_per_minute=10, total_budget_nano_usd=BUDGET_NANO_USD)
    limited = rig.key(limits=limits)
    assert [(await rig.ask(it, n)).status_code for it in (prepaid, limited) for n in (0, 1)] == (
        [200] * 4
    )
    rig.fleet.worker.switches.hang_after_tokens = 1
    running = asyncio.create_task(rig.ask(limited))
    await eventually(lambda: rig.fleet.worker.running)

    (rig.limiter.kill if how == "killed" else rig.limiter.freeze)()
    rig.fleet.worker.switches.hang_after_tokens = None
    answers = await asyncio.gather(*(rig.ask(limited, n) for n in range(30)))
    # Of 10 three are used: the gateways' shares of what was left when each last heard of it.
    num_granted = [it.status_code for it in answers].count(200)
    assert 7 <= num_granted <= 8
    assert {it.status_code for it in answers} == {200, 429}
    refused = await rig.ask(prepaid)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert rig.are_away() == [1, 1]
    running.cancel()
    await rig.fleet.settled()

    (rig.limiter.start if how == "killed" else rig.limiter.thaw)()
    await eventually(lambda: rig.are_away() == [0, 0])
    mine = [it for it in rig.fleet.usage.closed_events() if it.key_id == rig.last_key.key_id]
    assert len(mine) == 3 + num_granted
    assert await rig.spent() == sum(it.amount_nano_usd for it in mine)
    assert (await rig.ask(prepaid)).status_code == 200
