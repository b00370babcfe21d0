"""Requests whose clients leave at a random moment, and the leases left. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import redis.asyncio
import uvloop
from admission import running_service

from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.servers import valkey

IN_FLIGHT = 32


async def typical_s(client: httpx.AsyncClient) -> float:
    """Return what a request takes whose client stays, at the same load."""

    async def one() -> float:
        started_s = time.perf_counter()
        await client.post("/v1/chat/completions", json=chat_body(max_tokens=50))
        return time.perf_counter() - started_s

    await one()
    return statistics.median(await asyncio.gather(*(one() for _ in range(IN_FLIGHT))))


async def leave(client: httpx.AsyncClient, chosen: random.Random, longest_s: float) -> bool:
    """Send a request and leave at a random moment; say whether it was answered before that."""
    body = chat_body(max_tokens=50, stream=chosen.random() < 0.7)
    task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
    done, _ = await asyncio.wait({task}, timeout=chosen.uniform(0, longest_s))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return bool(done)


async def main(num_requests: int) -> int:
    """Run them over two gateways; return what is wrong: 0 = nothing."""
    with tempfile.TemporaryDirectory() as folder:
        server = valkey(Path(folder))
        server.start()
        async with running_service(server) as (_, address):
            fleet = GatewayFleet(Path(folder), settings={"ratelimit_address": address})
            await fleet.start()
            other = await fleet.add_gateway()
            urls = (fleet.base_url, f"http://127.0.0.1:{other.port}")
            headers = {"Authorization": f"Bearer {fleet.api_key}"}
            clients = [httpx.AsyncClient(base_url=it, headers=headers, timeout=30) for it in urls]
            longest_s = 1.5 * await typical_s(clients[0])
            numbers = iter(range(num_requests))
            answered = 0

            async def loop(seed: int) -> None:
                nonlocal answered
                chosen = random.Random(seed)
                for n in numbers:
                    answered += await leave(clients[n % 2], chosen, longest_s)

            started_s = time.perf_counter()
            await asyncio.gather(*(loop(n) for n in range(IN_FLIGHT)))
            elapsed_s = time.perf_counter() - started_s
            num_admitted = len(fleet.usage.closed_events())
            left = await leases_left(server.port, fleet.key.tenant_id)
            for client in clients:
                await client.aclose()
            await fleet.close()
        server.kill()
    print(
        f"{num_requests} requests in {elapsed_s:.0f} s, {num_admitted} of them "
        f"admitted, {num_requests - answered} left by their clients: {left} leases left"
    )
    # One in ten at least: else they left too early for the test to mean anything.
    return left + (num_admitted * 10 < num_requests)


async def leases_left(port: int, tenant_id: str) -> int:
    """Count what is held once all had time to come back, well within a lease's life."""
    async with redis.asyncio.Redis(port=port) as store:
        for _ in range(50):
            left = int(await store.hlen(f"hr:rl:{{{tenant_id}}}:holds"))
            if not left:
                break
            await asyncio.sleep(0.1)
    return left


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    sys.exit(bool(uvloop.run(main(parser.parse_args().requests))))
