"""Calls that no limit of a key counts are bounded by tenant; what anybody may ask is cheap."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from prometheus_client import CollectorRegistry, Counter

from headrace_common.errors import RateLimited
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Limits
from headrace_gateway.call_rate import CallRate
from headrace_gateway.routes import health
from headrace_testing.clock import FakeClock
from headrace_testing.gateway_fleet import GatewayFleet, chat_body

POLLED = (
    "/v1/usage",
    "/v1/requests/req_1",
    "/v1/models",
    "/v1/files",
    "/v1/batches",
    "/v1/responses/resp_1",
)


def test_the_rate_is_kept_exactly() -> None:
    """Two seconds' worth at once, then one each tenth of a second; a refusal costs nothing."""
    clock = FakeClock()
    rate = CallRate(10.0, clock)
    passed = 0
    for _ in range(100):
        for _ in range(50):
            with contextlib.suppress(RateLimited):
                rate.count("acme")
                passed += 1
        rate.count("another")
        clock.advance(0.1)
    assert passed == 20 + 99


def test_waiting_as_told_is_enough_and_slow_rates_let_one_through() -> None:
    """Also where a call is due less often than once in the burst's two seconds."""
    clock = FakeClock()
    rate = CallRate(0.1, clock)
    rate.count("acme")
    for _ in range(3):
        with pytest.raises(RateLimited) as refused:
            rate.count("acme")
        assert refused.value.retry_after_s is not None
        clock.advance(refused.value.retry_after_s)
        rate.count("acme")


async def test_who_polls_at_full_speed_is_told_to_wait(fleet_parts: GatewayFleet) -> None:
    """Whatever the path: 429 with its headers, for this tenant alone, and not for its requests."""
    fleet_parts.settings["calls_per_s"] = 0.01
    await fleet_parts.start()
    other_key, _ = fleet_parts.billing.create_key("another")
    try:
        async with fleet_parts.http() as client:
            answers = await asyncio.gather(*(client.get(POLLED[it % 6]) for it in range(60)))
            refused = [it for it in answers if it.status_code == 429]
            assert len(refused) == 59
            assert {it.request.url.path for it in refused} == set(POLLED)
            for answer in refused:
                assert answer.json()["error"]["code"] == "rate_limit_exceeded"
                assert answer.json()["error"]["type"] == "rate_limit_error"
                assert int(answer.headers["retry-after-ms"]) > 0
                assert (
                    answer.headers["ratelimit-policy"]
                    == '"organization-calls";q=1;qu="requests";w=100'
                )
                assert answer.headers["x-request-id"]
            made = await client.post(
                "/v1/batches",
                json={
                    "input_file_id": "file-1",
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                },
            )
            assert made.status_code == 429
            upload = await client.post(
                "/v1/files",
                data={"purpose": "batch"},
                files={"file": ("in.jsonl", b"{}" * 1_000_000)},
            )
            assert upload.status_code == 429
            other = {"authorization": f"Bearer {other_key}"}
            assert (await client.get("/v1/models", headers=other)).status_code == 200
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/v1/chat/completions", json=chat_body())).status_code == 200
    finally:
        await fleet_parts.close()


async def test_kept_answers_are_no_way_around(fleet_parts: GatewayFleet) -> None:
    """Repeating an answer costs nothing, so it is bounded; making new ones is not, by that."""
    fleet_parts.settings["calls_per_s"] = 0.01
    await fleet_parts.start()
    try:
        async with fleet_parts.http() as client:
            told = []
            for key in ("a", "a", "a", "b", "c"):
                headers = {"idempotency-key": key}
                answer = await client.post(
                    "/v1/chat/completions", json=chat_body(), headers=headers
                )
                told.append(answer.status_code)
            assert told == [200, 200, 429, 200, 200]
    finally:
        await fleet_parts.close()
    assert len(fleet_parts.worker.requests) == 3


async def test_a_key_without_right_is_still_told_so(fleet_parts: GatewayFleet) -> None:
    """Who has no key takes nobody's share, and limits of keys are not touched by these calls."""
    fleet_parts.settings["calls_per_s"] = 1
    await fleet_parts.start()
    key, _ = fleet_parts.new_key(limits=Limits(requests_per_minute=1))
    own = {"authorization": f"Bearer {key}"}
    try:
        async with fleet_parts.http() as client:
            for _ in range(10):
                wrong = await client.get("/v1/models", headers={"authorization": "Bearer x"})
                assert wrong.status_code == 401
            assert (await client.get("/v1/models", headers=own)).status_code == 200
            answer = await client.post("/v1/chat/completions", json=chat_body(), headers=own)
            assert answer.status_code == 200
    finally:
        await fleet_parts.close()


async def test_many_who_ask_for_metrics_share_a_rendering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anybody may ask, without a key, and a rendering stops all streams; none is ever old."""
    registry = CollectorRegistry()
    seen = Counter("seen", "What happened before a scrape must be in it.", registry=registry)
    num_renderings = 0

    def render(shown: CollectorRegistry) -> bytes:
        nonlocal num_renderings
        num_renderings += 1
        return str(shown.get_sample_value("seen_total")).encode()

    monkeypatch.setattr(health, "generate_latest", render)
    text = health._MetricsText(registry)

    async def scrape() -> None:
        seen.inc()
        before = registry.get_sample_value("seen_total")
        assert before is not None
        assert float(await text.read()) >= before

    await asyncio.gather(*(scrape() for _ in range(50)))
    assert num_renderings == 1
    await asyncio.gather(*(scrape() for _ in range(50)))
    assert num_renderings == 2
    await scrape()
    assert num_renderings == 3
