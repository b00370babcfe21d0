"""Limits as one gateway keeps them, with the rate limiter and without."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest

from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Limits
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_answers import CHAT, ask, degraded, is_limiter_away
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually


async def test_denials_are_told_apart(fleet: GatewayFleet) -> None:
    """Money: 429, no waiting. Too large: 400. Slots: 429 and when. No store: 503."""
    for limits, status, code, has_retry in (
        (Limits(total_budget_nano_usd=0), 429, "insufficient_quota", False),
        (Limits(tokens_per_minute=20), 400, "request_too_large_for_limit", False),
    ):
        key, _ = fleet.new_key(limits=limits)
        refused = await ask(fleet, key, stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert ("retry-after" in refused.headers) == has_retry
    fleet.limiter.degraded = True
    key, _ = fleet.new_key(prepaid=True, limits=Limits(total_budget_nano_usd=10**9))
    unavailable = await ask(fleet, key)
    assert (unavailable.status_code, "retry-after" in unavailable.headers) == (503, True)
    assert fleet.usage.events == []


async def test_slots_are_held_while_a_request_runs(fleet: GatewayFleet) -> None:
    """The second at once is told when to come back, and passes once the first is over."""
    key, _ = fleet.new_key(limits=Limits(max_concurrent=1))
    fleet.worker.switches.hang_after_tokens = 1
    first = asyncio.create_task(ask(fleet, key))
    await eventually(lambda: fleet.worker.running)
    refused = await ask(fleet, key)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    first.cancel()
    await fleet.settled()
    fleet.worker.switches.hang_after_tokens = None
    assert (await ask(fleet, key)).status_code == 200


async def test_cached_input_counts_only_if_the_plan_says_so(fleet: GatewayFleet) -> None:
    """What came from the cache is given back to the input limit, or is not."""
    for counts in (False, True):
        key, _ = fleet.new_key(counts_cached_input=counts)
        for _ in range(2):
            answer = await ask(fleet, key, content="water " * 40)
        await fleet.settled()
        actual = fleet.limiter.settles[-1].actual
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached < actual.input_tokens
        assert actual.cached_input_tokens == (0 if counts else cached)


async def test_limiter_down(fleet: GatewayFleet) -> None:
    """The gateway's share decides, prepaid money is refused; back, the limiter knows of all."""
    prepaid, _ = fleet.new_key(prepaid=True, limits=Limits(total_budget_nano_usd=10**9))
    limited, key = fleet.new_key(limits=Limits(requests_per_minute=3))
    await fleet.limiter_server.kill()
    answers = [await ask(fleet, limited) for _ in range(5)]
    assert [it.status_code for it in answers] == [200] * 3 + [429] * 2
    assert int(answers[-1].headers["retry-after"]) <= 20
    refused = await ask(fleet, prepaid)
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert degraded(fleet, "ratelimit") == 3
    assert is_limiter_away(fleet) == 1
    assert len(fleet.usage.closed_events()) == 3
    await fleet.limiter_server.start()
    await eventually(lambda: is_limiter_away(fleet) == 0)
    assert {it.tenant_id for it in fleet.limiter.settles} == {key.tenant_id}
    assert fleet.limiter.live_leases() == []
    assert (await ask(fleet, prepaid)).status_code == 200


async def test_slots_come_back_however_a_request_ends(fleet: GatewayFleet) -> None:
    """Broken body, unknown model, blocked input, lost worker: no lease stays open."""
    fleet.guard.blocklist = ["heron"]
    async with fleet.http() as client:
        await client.post(CHAT, content=b"{bad")
    await ask(fleet, model="none")
    await ask(fleet, content="heron")
    fleet.worker.switches.die_after_tokens = 0
    await ask(fleet)
    await fleet.settled()
    assert {len(fleet.limiter.admits), len(fleet.limiter.settles)} == {2}


async def test_sdks_repeat_no_request_that_has_no_money(fleet: GatewayFleet) -> None:
    """They would by themselves, as any 429; a rate limit they do wait for."""
    poor, _ = fleet.new_key(limits=Limits(total_budget_nano_usd=1))
    message: list[Any] = [{"role": "user", "content": "hi"}]
    async with fleet.openai(poor) as client, fleet.anthropic(poor) as other:
        with pytest.raises(openai.RateLimitError):
            await client.with_options(max_retries=2).chat.completions.create(
                model=MODEL, messages=message
            )
        with pytest.raises(anthropic.RateLimitError):
            await other.with_options(max_retries=2).messages.create(
                model=MODEL, messages=message, max_tokens=5
            )
    for endpoint in ("chat", "messages"):
        labels = {"endpoint": endpoint, "outcome": "BUDGET_EXHAUSTED"}
        count = fleet.gateway.registry.get_sample_value("headrace_gateway_requests_total", labels)
        assert count == 1
