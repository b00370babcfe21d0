"""How long decisions take when Redis stops, freezes or loses its data under load. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis.asyncio
import uvloop
from admission import figures, request_of, running_service

from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_ratelimit.settings import RateLimitSettings
from headrace_testing.servers import LocalServer, valkey

IN_FLIGHT = 8
OUTAGE_S = 1.0


async def lose_data(server: LocalServer) -> None:
    """Empty it while it runs."""
    async with redis.asyncio.Redis(port=server.port) as client:
        await client.flushall()


async def measure(name: str, hurt: Callable[[LocalServer], object], seconds: float) -> None:
    """Load, hurt the store in the middle, and tell what decisions took before and after."""
    done: list[tuple[float, float, bool]] = []
    with tempfile.TemporaryDirectory() as folder:
        server = valkey(Path(folder))
        server.start()
        try:
            patience_s = RateLimitSettings().redis_timeout_s
            async with running_service(server, patience_s) as (client, _):
                end_s = time.perf_counter() + seconds + OUTAGE_S

                async def loop(tenant: int) -> None:
                    while (started_s := time.perf_counter()) < end_s:
                        answer = await client.admit(request_of(tenant))
                        now_s = time.perf_counter()
                        done.append((started_s, now_s - started_s, answer.degraded))
                        if answer.outcome == pb.AdmitResponse.OUTCOME_UNSPECIFIED:
                            raise RuntimeError("an admission without an outcome")
                        await asyncio.sleep(0.002)

                tasks = [asyncio.create_task(loop(n)) for n in range(IN_FLIGHT)]
                await asyncio.sleep(seconds)
                hurt_s = time.perf_counter()
                result = hurt(server)
                if asyncio.iscoroutine(result):
                    await result
                await asyncio.gather(*tasks)
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
        f"{name:9} before p50 {before.p50_ms:6.2f} p99 {before.p99_ms:6.2f} ms;  "
        f"caught by it at most {first_ms:6.1f} ms more (goal 50);  "
        f"later p50 {after.p50_ms:6.2f} p99 {after.p99_ms:6.2f} ms, "
        f"{after.p50_ms - before.p50_ms:5.2f} ms more (goal 1), {len(later)} of "
        f"{after.num} by the local share"
    )


async def main(seconds: float) -> None:
    """Run all three."""
    await measure("frozen", LocalServer.freeze, seconds)
    await measure("stopped", LocalServer.kill, seconds)
    await measure("lost data", lose_data, seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time before the loss")
    uvloop.run(main(parser.parse_args().seconds))
