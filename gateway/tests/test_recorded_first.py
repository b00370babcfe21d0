"""A client that has seen a byte finds its request in the ledger, whenever the gateway dies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace_testing.fake_worker import saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body

CHAT = chat_body(stream=True)
TWO_PROMPTS = {"model": CHAT["model"], "prompt": ["One", "Two"], "stream": True}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TWO_PROMPTS)]
)
async def test_no_byte_of_a_stream_before_its_request_is_recorded(
    fleet: GatewayFleet, path: str, body: dict[str, Any]
) -> None:
    """Not even the status line, with one job and with several."""
    fleet.worker.script = saying("Hello")
    may_go = asyncio.Event()

    async def until_recorded(_: asyncio.Future[None]) -> None:
        await may_go.wait()

    fleet.usage.until_recorded = until_recorded  # type: ignore[method-assign]
    async with fleet.http() as client:
        answering = asyncio.create_task(client.post(path, json=body))
        await asyncio.wait({answering}, timeout=0.3)
        assert not answering.done()
        may_go.set()
        assert (await answering).status_code == 200


async def test_a_comment_against_silence_waits_too(fleet_parts: GatewayFleet) -> None:
    """It would be the first byte."""
    fleet_parts.settings = {"keep_alive_s": 0.05, "silent_start_s": 0.05}
    may_go = asyncio.Event()

    async def until_recorded(_: asyncio.Future[None]) -> None:
        await may_go.wait()

    fleet_parts.usage.until_recorded = until_recorded  # type: ignore[method-assign]
    await fleet_parts.start()
    try:
        fleet_parts.worker.script = saying("Hello")
        async with fleet_parts.http() as client:
            request = client.build_request("POST", "/v1/chat/completions", json=CHAT)
            answering = asyncio.create_task(client.send(request, stream=True))
            await asyncio.wait({answering}, timeout=0.4)
            assert not answering.done()
            may_go.set()
            assert (await answering).status_code == 200
            await (await answering).aread()
    finally:
        await fleet_parts.close()
