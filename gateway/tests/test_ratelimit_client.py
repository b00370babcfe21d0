"""The way to the rate limiter: its time-out is for the limiter, not for our own pauses."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from headrace_common.errors import Deadline, ReplicaLost
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.clients.ratelimit import RateLimitClient
from headrace_testing.fake_ratelimit import FakeRateLimit, FakeRateLimitServer


class Slow(FakeRateLimit):
    """Keeps the loop that all of this test runs on."""

    pause_s = 0.0

    def admit(self, request: pb.AdmitRequest, done) -> None:  # type: ignore[no-untyped-def]
        time.sleep(self.pause_s)
        super().admit(request, done)


async def test_an_answer_that_lies_unread_is_no_time_out() -> None:
    """A loop that stood still for longer than the time-out takes the answer: a limit holds."""
    fake = Slow()
    async with FakeRateLimitServer(fake) as server:
        client = RateLimitClient(server.address, 5)
        request = pb.AdmitRequest(lease_id="a", tenant_id="t", lease_ms=1000)
        await client.admit(request)
        await client.close()
        client = RateLimitClient(server.address, 0.1)
        fake.pause_s = 0.3
        assert (await client.admit(request)).outcome == pb.AdmitResponse.OUTCOME_ADMITTED
        await client.close()


async def test_a_greeting_that_lies_unread_is_no_time_out() -> None:
    """Nor is a loop that stood still while the connection was being made."""
    async with FakeRateLimitServer(FakeRateLimit()) as server:
        client = RateLimitClient(server.address, 0.1)
        admitted = [
            asyncio.create_task(
                client.admit(pb.AdmitRequest(lease_id=it, tenant_id="t", lease_ms=1000))
            )
            for it in ("a", "b")
        ]
        for _ in range(2):
            await asyncio.sleep(0)
            time.sleep(0.3)  # noqa: ASYNC251 - that the loop stands still is the point
        for answer in await asyncio.gather(*admitted):
            assert answer.outcome == pb.AdmitResponse.OUTCOME_ADMITTED
        await client.close()


async def test_a_limiter_that_does_not_answer_is_given_up() -> None:
    """While this process runs, the time-out is what was set."""

    class Silent(FakeRateLimit):
        def admit(self, request: pb.AdmitRequest, done) -> None:  # type: ignore[no-untyped-def]
            """Never answer."""

    async with FakeRateLimitServer(Silent()) as server:
        client = RateLimitClient(server.address, 0.05)
        with pytest.raises(Deadline):
            await client.admit(pb.AdmitRequest(lease_id="a", tenant_id="t", lease_ms=1000))
        await client.close()


async def test_a_limiter_that_takes_no_connection_is_given_up_as_fast() -> None:
    """Frozen from the beginning: its kernel says yes, nobody greets."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = RateLimitClient(f"127.0.0.1:{silent.getsockname()[1]}", 0.05)
        for _ in range(2):
            with pytest.raises(Deadline):
                await client.admit(pb.AdmitRequest(lease_id="a", tenant_id="t", lease_ms=1000))
        await client.close()


async def test_a_settlement_need_not_be_waited_for() -> None:
    """Its answer comes by itself; without an open stream it does not begin."""
    fake = FakeRateLimit()
    async with FakeRateLimitServer(fake) as server:
        client = RateLimitClient(server.address, 5)
        settle = pb.SettleRequest(lease_id="a", tenant_id="t")
        assert client.settle_soon(settle) is None
        await client.admit(pb.AdmitRequest(lease_id="a", tenant_id="t", lease_ms=1000))
        answer = client.settle_soon(settle)
        assert answer is not None
        assert (await answer).settle.settled
        assert fake.live_leases() == []
        await client.close()
        assert client.settle_soon(settle) is None


async def test_calls_of_a_connection_that_breaks_are_told_so() -> None:
    """Whoever waits learns it, and whoever does not."""

    class Silent(FakeRateLimit):
        def admit(self, request: pb.AdmitRequest, done) -> None:  # type: ignore[no-untyped-def]
            """Never answer."""

    async with FakeRateLimitServer(Silent()) as server:
        client = RateLimitClient(server.address, 30)
        waiting = asyncio.create_task(
            client.admit(pb.AdmitRequest(lease_id="a", tenant_id="t", lease_ms=1000))
        )
        await asyncio.sleep(0.2)
        await client.close()
        with pytest.raises(ReplicaLost):
            await waiting
