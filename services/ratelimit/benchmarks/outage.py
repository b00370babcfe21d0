"""How long decisions take when Redis or the rate limiter itself goes under load. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis.asyncio
import uvloop
from admission import figures, request_of, running_service
from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_common.limits.local_share import LocalShare
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.clients.ratelimit import RateLimitClient
from headrace_gateway.limiter_outage import OutageProofLimiter
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.settings import GatewaySettings
from headrace_ratelimit.settings import RateLimitSettings
from headrace_testing.servers import LocalServer, valkey

IN_FLIGHT = 8
OUTAGE_S = 1.0


async def lose_data(server: LocalServer, _: int) -> None:
    """Empty it while it runs."""
    async with redis.asyncio.Redis(port=server.port) as client:
        await client.flushall()


def gateway_way(client: RateLimitClient) -> OutageProofLimiter:
    """Make the limiter as a gateway sees it."""
    share = LocalShare(1, 0.05, SystemClock())
    return OutageProofLimiter(client, share, GatewayMetrics(CollectorRegistry()))


async def measure(
    name: str, hurt: Callable[[LocalServer, int], object], seconds: float, goal_ms: float = 50
) -> None:
    """Load, hurt something in the middle, and tell what decisions took before and after.

    Args:
        name: of what is done.
        hurt: takes the store and the process id of the rate limiter.
        seconds: of load before it.
        goal_ms: what a decision that is caught by it may take more.
    """
    done: list[tuple[float, float, bool]] = []
    with tempfile.TemporaryDirectory() as folder:
        server = valkey(Path(folder))
        server.start()
        try:
            patience_s = RateLimitSettings().redis_timeout_s
            async with running_service(server, patience_s) as (client, address):
                # The benchmark's own client waits long; a gateway's does not.
                near = RateLimitClient(address, GatewaySettings().admit_timeout_s)
                limiter = gateway_way(near)
                end_s = time.perf_counter() + seconds + OUTAGE_S

                async def loop(tenant: int) -> None:
                    while (started_s := time.perf_counter()) < end_s:
                        answer = await limiter.admit(request_of(tenant))
                        now_s = time.perf_counter()
                        done.append((started_s, now_s - started_s, answer.degraded))
                        if answer.outcome == pb.AdmitResponse.OUTCOME_UNSPECIFIED:
                            raise RuntimeError("an admission without an outcome")
                        await asyncio.sleep(0.002)

                tasks = [asyncio.create_task(loop(n)) for n in range(IN_FLIGHT)]
                await asyncio.sleep(seconds)
                hurt_s = time.perf_counter()
                result = hurt(server, client.pid)
                if asyncio.iscoroutine(result):
                    await result
                await asyncio.gather(*tasks)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(client.pid, signal.SIGCONT)
                await limiter.close()
                await near.close()
        finally:
            with contextlib.suppress(Exception):
                server.thaw()
            server.kill()
    before = figures([took for at, took, _ in done if at + took < hurt_s], seconds)
    caught = [took for at, took, _ in done if hurt_s - took <= at <= hurt_s + 0.1]
    later = [took for at, took, is_degraded in done if at > hurt_s + 0.1 and is_degraded]
    after = figures([took for at, took, _ in done if at > hurt_s + 0.1], OUTAGE_S - 0.1)
    first_ms = max(caught, default=0.0) * 1000 - before.p50_ms
    print(
        f"{name:15} before p50 {before.p50_ms:6.2f} p99 {before.p99_ms:6.2f} ms;  "
        f"caught by it at most {first_ms:6.1f} ms more (goal {goal_ms:.0f});  "
        f"later p50 {after.p50_ms:6.2f} p99 {after.p99_ms:6.2f} ms, "
        f"{after.p50_ms - before.p50_ms:5.2f} ms more (goal 1), {len(later)} of "
        f"{after.num} by the local share"
    )


async def main(seconds: float) -> None:
    """Run all five."""
    await measure("Redis frozen", lambda it, _: it.freeze(), seconds)
    await measure("Redis stopped", lambda it, _: it.kill(), seconds)
    await measure("Redis lost data", lose_data, seconds)
    await measure("limiter killed", lambda _, pid: os.kill(pid, signal.SIGKILL), seconds)
    most_ms = GatewaySettings().admit_timeout_s * 1000
    await measure("limiter frozen", lambda _, pid: os.kill(pid, signal.SIGSTOP), seconds, most_ms)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time before the loss")
    uvloop.run(main(parser.parse_args().seconds))
