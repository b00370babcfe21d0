"""Clients that hang up or do not read: the work stops, and what was made is billed."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from headrace_contracts.usage.v1 import usage_pb2
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_answers import CHAT, ask
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("tokens_before", [0, 4])
async def test_leaving_cancels_everything(
    fleet: GatewayFleet, streaming: bool, tokens_before: int
) -> None:
    """Worker call cancelled, lease settled, load given back, closed once as left."""
    fleet.worker.switches.hang_after_tokens = tokens_before
    asked = asyncio.create_task(ask(fleet, stream=streaming))
    await eventually(lambda: fleet.worker.running)
    await asyncio.sleep(0.1)
    asked.cancel()
    await eventually(lambda: fleet.worker.cancelled)
    await fleet.settled()
    (closed,) = fleet.usage.closed_events()
    assert closed.ending == usage_pb2.ENDING_CLIENT_GONE
    assert closed.usage.output_tokens == tokens_before
    assert closed.usage.prompt_tokens > 0
    assert fleet.settled_amounts(closed.request_id).output_tokens == tokens_before
    outcome = {"endpoint": "chat", "outcome": "CLIENT_GONE"}
    await eventually(
        lambda: fleet.gateway.registry.get_sample_value("headrace_gateway_requests_total", outcome)
    )


@pytest.mark.parametrize("streaming", [True, False])
async def test_leaving_an_unguarded_answer_cancels_it_too(
    fleet: GatewayFleet, streaming: bool
) -> None:
    """Without a guard one task serves it; the worker hears of it, what was made is billed."""
    key, _ = fleet.new_key(guard_fail_open=True)
    await fleet.guard_server.kill()
    fleet.worker.switches.hang_after_tokens = 4
    asked = asyncio.create_task(ask(fleet, key, stream=streaming))
    await eventually(lambda: fleet.worker.running)
    await asyncio.sleep(0.1)
    asked.cancel()
    await eventually(lambda: fleet.worker.cancelled)
    await fleet.settled()
    (closed,) = fleet.usage.closed_events()
    assert (closed.ending, closed.usage.output_tokens) == (usage_pb2.ENDING_CLIENT_GONE, 4)


async def test_leaving_a_background_response_before_it_is_queued(fleet: GatewayFleet) -> None:
    """Nobody knows its id, so nothing is made; once it was told, leaving changes nothing."""
    fleet.guard.switches.delay_s = 0.6
    body = {"model": MODEL, "input": "hi", "background": True}
    async with fleet.http() as client:
        asked = asyncio.create_task(client.post("/v1/responses", json=body))
        await eventually(lambda: fleet.guard.inputs)
        asked.cancel()
        await asyncio.sleep(1.2)
        await fleet.settled()
        assert not fleet.worker.requests
        assert not fleet.usage.closed_events()
        assert (await client.post("/v1/responses", json=body)).status_code == 200
    await eventually(lambda: fleet.worker.requests)


async def test_leaving_during_the_body_costs_nothing(fleet: GatewayFleet) -> None:
    """Half a body and gone: nothing was admitted."""
    _reader, writer = await asyncio.open_connection("127.0.0.1", fleet.gateway.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {fleet.api_key}\r\n"
    writer.write(head.encode() + b"Content-Length: 1000\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    outcome = {"endpoint": "chat", "outcome": "CLIENT_GONE"}
    await eventually(
        lambda: fleet.gateway.registry.get_sample_value("headrace_gateway_requests_total", outcome)
    )
    assert fleet.limiter.admits == []


async def test_client_that_does_not_read_is_cut(fleet_parts: GatewayFleet) -> None:
    """A reader that stops holds no worker for longer than the bound."""
    fleet_parts.settings = {"slow_reader_s": 0.3}
    await fleet_parts.start()
    try:
        fleet_parts.worker.script = saying("x")
        fields = {"max_tokens": 4000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
        body = json.dumps(chat_body(stream=True, **fields)).encode()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", fleet_parts.gateway.port))
        _reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        head += f"{fleet_parts.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await eventually(fleet_parts.usage.closed_events, within_s=15)
        (closed,) = fleet_parts.usage.closed_events()
        assert closed.ending == usage_pb2.ENDING_CLIENT_GONE
        assert closed.usage.output_tokens < 4000
        writer.close()
        await fleet_parts.settled()
    finally:
        await fleet_parts.close()
