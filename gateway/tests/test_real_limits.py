"""Limits as clients of two gateways meet them, with the real rate limiter and a real Redis."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from headrace_common.lifecycle import Lifecycle, cancel_and_wait, raise_if_cancelled
from headrace_common.rpc import Call
from headrace_contracts.billing.v1 import billing_pb2
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import LEVEL_MODEL, Limits
from headrace_ratelimit.server import RateLimitServer
from headrace_ratelimit.settings import RateLimitSettings
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.redis


class Rig:
    """Two gateways that share one rate limiter."""

    def __init__(self, fleet: GatewayFleet, other_url: str, store: redis.asyncio.Redis) -> None:
        self.fleet, self.store = fleet, store
        self.urls = [fleet.base_url, other_url]

    def clients(self, **limits: Any) -> list[httpx.AsyncClient]:
        api_key, self.key = self.fleet.new_key(limits=Limits(**limits))
        headers = {"Authorization": f"Bearer {api_key}"}
        return [httpx.AsyncClient(base_url=url, headers=headers, timeout=30) for url in self.urls]

    async def num_leases(self) -> int:
        leases, held = (
            f"hr:rl:{{{self.key.tenant_id}}}:live",
            f"hr:rl:{{{self.key.tenant_id}}}:holds",
        )
        return int(await self.store.zcard(leases)) + int(await self.store.hlen(held))


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=chat_body(**{"max_tokens": 4, **fields}))


@pytest.fixture
async def rig(redis_db_url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    settings = RateLimitSettings(redis_url=redis_db_url, redis_timeout_s=2.0)
    limiter = RateLimitServer(settings, Lifecycle())
    await limiter.start()
    fleet = GatewayFleet(tmp_path, settings={"ratelimit_address": limiter.address})
    try:
        await fleet.start()
        other = await fleet.add_gateway()
        async with redis.asyncio.Redis.from_url(redis_db_url) as store:
            yield Rig(fleet, f"http://127.0.0.1:{other.port}", store)
    finally:
        await fleet.close()
        await limiter.stop()


async def test_ten_of_sixty_simultaneous_requests_pass_a_key_of_ten_a_minute(rig: Rig) -> None:
    """Over both gateways together, to the request; the rest is told when to come back."""
    clients = rig.clients(requests_per_minute=10)
    started_s = time.monotonic()
    answers = await asyncio.gather(*(ask(clients[n % 2]) for n in range(60)))
    # One of ten a minute comes back each 6 s: only if the burst took that long may it pass too.
    most = 10 + int((time.monotonic() - started_s) / 6)
    assert 10 <= [it.status_code for it in answers].count(200) <= most
    refused = [it for it in answers if it.status_code != 200]
    assert {it.status_code for it in refused} == {429}
    assert all(0 < int(it.headers["retry-after"]) <= 6 for it in refused)
    assert {it.json()["error"]["code"] for it in refused} == {"rate_limit_exceeded"}
    for client in clients:
        await client.aclose()


async def test_a_client_that_waits_out_retry_after_is_admitted(rig: Rig) -> None:
    """The header is true: no earlier promise, no second refusal."""
    client, _ = clients = rig.clients(requests_per_minute=20)
    answers = await asyncio.gather(*(ask(client) for _ in range(45)))
    refused = next(it for it in answers if it.status_code == 429)
    await asyncio.sleep(int(refused.headers["retry-after"]))
    assert (await ask(client)).status_code == 200
    for it in clients:
        await it.aclose()


async def test_one_of_eight_simultaneous_requests_passes_a_budget_for_one(rig: Rig) -> None:
    """Money is held before the work; what was not used is there again after it."""
    # At the fake's prices: 20 nano-USD a prompt token, 60 an output token.
    probe, _ = free = rig.clients()
    usage = (await ask(probe, max_tokens=100)).json()["usage"]
    hold = 25 * usage["prompt_tokens"] + 60 * 100
    clients = rig.clients(total_budget_nano_usd=hold * 3 // 2)
    answers = await asyncio.gather(*(ask(clients[n % 2], max_tokens=100) for n in range(8)))
    assert [it.status_code for it in answers].count(200) == 1
    refused = next(it for it in answers if it.status_code != 200)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert "retry-after" not in refused.headers
    for it in (*free, *clients):
        await it.aclose()


async def test_clients_that_leave_at_any_moment_leave_no_lease(rig: Rig) -> None:
    """Whatever was under way when they left: slots and money come back, the same second."""
    chosen = random.Random(6)
    clients = rig.clients(max_concurrent=1000, total_budget_nano_usd=10**15)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, await rig.num_leases())
            raise_if_cancelled()
            await asyncio.sleep(0.01)

    def forty() -> list[asyncio.Task[httpx.Response]]:
        return [
            asyncio.create_task(ask(clients[n % 2], max_tokens=50, stream=bool(n % 3)))
            for n in range(40)
        ]

    watching = asyncio.create_task(watch())
    # The moments are spread over what forty take from beginning to end, whatever the machine.
    began_s = time.monotonic()
    await asyncio.gather(*forty())
    took_s = time.monotonic() - began_s
    most = 0
    for _ in range(5):
        tasks = forty()
        for task in tasks:
            asyncio.get_running_loop().call_later(chosen.uniform(0, took_s), task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
    await cancel_and_wait(watching)
    assert most > 0, "nobody was admitted before leaving: this would prove nothing"

    async def is_empty() -> bool:
        return await rig.num_leases() == 0

    await eventually(is_empty, within_s=15)
    for client in clients:
        await client.aclose()


async def test_every_answer_tells_of_limits(rig: Rig) -> None:
    """Whole answers, streams, refusals before and after admission, and denials."""
    client, _ = clients = rig.clients(requests_per_minute=3, tokens_per_minute=10_000)
    answers = [
        await ask(client),
        await ask(client, stream=True),
        await client.post("/v1/chat/completions", content=b"{broken"),
        await ask(client, model="no-such-model"),
        await ask(client),
        await ask(client),
        await ask(client, max_tokens=..., messages=[]),
    ]
    assert [it.status_code for it in answers] == [200, 200, 400, 404, 200, 429, 400]
    left = [it.headers["x-ratelimit-remaining-requests"] for it in answers]
    assert left == ["2", "1", "1", "1", "0", "0", "0"]
    for it in answers:
        assert it.headers["x-ratelimit-limit-requests"] == "3"
        assert it.headers["x-ratelimit-limit-tokens"] == "10000"
        assert '"key-requests-per-minute";q=3;qu="requests";w=60' in it.headers["ratelimit-policy"]
        assert '"key-requests-per-minute";r=' in it.headers["ratelimit"]
        assert it.headers.get_list("ratelimit-policy") == [it.headers["ratelimit-policy"]]
    for it in clients:
        await it.aclose()


async def test_a_changed_limit_holds_everywhere_at_once(rig: Rig) -> None:
    """No restart, within a second of the change at both gateways: five are allowed."""
    clients = rig.clients(requests_per_minute=1000)
    for client in clients:
        assert (await ask(client)).headers["x-ratelimit-limit-requests"] == "1000"
    key = billing_pb2.Key()
    key.CopyFrom(rig.key)
    key.limits.requests_per_minute = 7
    await rig.fleet.billing.UpdateKey(billing_pb2.UpdateKeyRequest(key=key), Call(None))

    async def is_everywhere() -> bool:
        answers = [await ask(client) for client in clients]
        return {it.headers["x-ratelimit-limit-requests"] for it in answers} == {"7"}

    await eventually(is_everywhere, within_s=5)
    for client in clients:
        await client.aclose()


async def test_a_models_own_limit_binds_that_model(rig: Rig) -> None:
    """At the level of the tenant's model, whatever its keys allow."""
    client, _ = clients = rig.clients(requests_per_minute=1000)
    request = billing_pb2.SetLimitsRequest(
        level=LEVEL_MODEL,
        tenant_id=rig.key.tenant_id,
        scope_id=MODEL,
        limits=Limits(requests_per_minute=1),
    )
    await rig.fleet.billing.SetLimits(request, Call(None))
    await asyncio.sleep(0)
    answers = [await ask(client) for _ in range(2)]
    assert [it.status_code for it in answers] == [200, 429]
    assert "this model" in answers[1].json()["error"]["message"]
    for it in clients:
        await it.aclose()
