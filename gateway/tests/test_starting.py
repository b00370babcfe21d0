"""A gateway that has just started: it learns what there is before it refuses anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from headrace_common.lifecycle import Lifecycle
from headrace_gateway import model_directory
from headrace_gateway.app import Gateway
from headrace_gateway.settings import GatewaySettings
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually

HI = [{"role": "user", "content": "hi"}]
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/chat/completions", chat_body(stream=True)),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "hi"}),
    ("POST", "/v1/responses", {"model": MODEL, "input": "hi", "background": True}),
    ("POST", "/v1/responses/input_tokens", {"model": MODEL, "input": "hi"}),
    ("POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": HI}),
    ("POST", "/tokenize", {"model": MODEL, "prompt": "hi"}),
    ("GET", f"/v1/models/{MODEL}", {}),
    ("GET", "/v1/models", {}),
]


@asynccontextmanager
async def starting(fleet: GatewayFleet) -> AsyncIterator[httpx.AsyncClient]:
    """Run one more gateway, while the router is away, and yield its client once it listens."""
    await fleet.router_server.kill()
    lifecycle = Lifecycle()
    gateway = Gateway(GatewaySettings(**fleet.settings), lifecycle, usage_log=fleet.usage)
    running = asyncio.create_task(gateway.run())
    await eventually(lambda: lifecycle.is_ready)
    headers = {"Authorization": f"Bearer {fleet.api_key}"}
    base_url = f"http://127.0.0.1:{gateway.port}"
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=20) as client:
        yield client
    lifecycle.stopping.set()
    await running


async def test_requests_of_the_first_moment_wait_until_the_fleet_is_known(
    fleet: GatewayFleet,
) -> None:
    """Nothing is refused nor found empty because the router has not been heard yet."""
    fleet.worker.script = saying("Hello")
    async with starting(fleet) as client:
        asked = [
            asyncio.create_task(client.request(method, path, json=body or None))
            for method, path, body in CALLS
        ]
        done, _ = await asyncio.wait(asked, timeout=0.5)
        assert not done
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        await fleet.router_server.start()
        answers = [await it for it in asked]
        assert [it.status_code for it in answers] == [200] * len(CALLS)
        assert [it["id"] for it in answers[-1].json()["data"]] == [MODEL]
        assert (await client.get("/ready")).status_code == 200


async def test_the_wait_is_bounded(fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fleet it says so, and later requests are told at once."""
    monkeypatch.setattr(model_directory, "_LEARNING_S", 0.3)
    async with starting(fleet) as client:
        for _ in range(2):
            async with asyncio.timeout(20):
                refused = await client.post("/v1/chat/completions", json=chat_body(stream=True))
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
        assert (await client.get("/v1/models")).json()["data"] == []


async def test_a_name_that_nobody_serves_is_refused_at_once(fleet: GatewayFleet) -> None:
    """Once the fleet is known there is nothing to wait for."""
    fleet.gateway.directory._learns_until_s = time.monotonic() + 60
    async with fleet.http() as client, asyncio.timeout(20):
        refused = await client.post("/v1/chat/completions", json=chat_body(model="nobody"))
    assert refused.status_code == 404
