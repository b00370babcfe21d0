"""Admissions a second: through the service, by direct script calls, by `limits`. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis.asyncio
import uvloop

from headrace_common.limits.plans import Plans
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.clients.ratelimit import RateLimitClient
from headrace_ratelimit.store import admit_op, call_args, library
from headrace_testing.servers import LocalServer, valkey
from headrace_testing.waiting import eventually, free_port

IN_FLIGHT = 32
PACE = 300
ADMITTED = pb.AdmitResponse.OUTCOME_ADMITTED
PEER_HINT = (
    "the `limits` package is not installed: pip install --no-deps --target DIR limits==5.8.0 "
    "deprecated wrapt, then PYTHONPATH=DIR:$PYTHONPATH"
)

Admit = Callable[[int], Awaitable[bool]]
# What admits, and the process that does it, if that is neither this one nor the store.
Way = tuple[Admit, int | None]
_numbers = itertools.count()


@dataclass
class Figures:
    """What one way of admitting did."""

    per_s: float
    p50_ms: float
    p99_ms: float
    num: int

    def __str__(self) -> str:
        return f"{self.per_s:8.0f}/s   p50 {self.p50_ms:7.2f} ms   p99 {self.p99_ms:7.2f} ms"


class CpuTimes:
    """CPU time of some processes from now on: hardly depends on what else the machine does."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._before = self._now()

    def per_call_us(self, num_calls: int) -> str:
        """Say what a call cost each."""
        spent = {name: (now - self._before[name]) * 1e6 for name, now in self._now().items()}
        parts = [f"{name} {us / num_calls:.0f}" for name, us in spent.items()]
        return f"CPU us: {', '.join(parts)}"

    def _now(self) -> dict[str, float]:
        return {name: sum(it.cpu_times()[:2]) for name, it in self._processes.items()}


def figures(latencies_s: list[float], elapsed_s: float) -> Figures:
    """Sum up."""
    ordered = sorted(latencies_s)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000

    return Figures(len(ordered) / elapsed_s, at(0.5), at(0.99), len(ordered))


@functools.cache
def scope_of(tenant: int) -> pb.Scope:
    """Make limits that none of the measurements reaches. Gateways too have them made."""
    limits = pb.Limits(
        requests_per_minute=10**8,
        input_tokens_per_minute=10**10,
        output_tokens_per_minute=10**10,
        max_concurrent=10**8,
        day_budget_nano_usd=10**15,
        month_budget_nano_usd=10**15,
    )
    return pb.Scope(level=pb.LEVEL_KEY, scope_id=f"key-{tenant}", limits=limits)


def request_of(tenant: int) -> pb.AdmitRequest:
    """Make a request."""
    return pb.AdmitRequest(
        lease_id=f"lease-{os.getpid()}-{next(_numbers)}",
        tenant_id=f"tenant-{tenant}",
        scopes=[scope_of(tenant)],
        reserve=pb.Amounts(requests=1, input_tokens=700, output_tokens=300, cost_nano_usd=32_000),
        # As gateways have it.
        lease_ms=30_000,
        brief=True,
    )


async def flood(admit: Admit, num_tenants: int, seconds: float) -> Figures:
    """Keep 32 in flight."""
    latencies: list[float] = []
    end_s = time.perf_counter() + seconds

    async def loop(seed: int) -> None:
        chosen = random.Random(seed)
        while (started_s := time.perf_counter()) < end_s:
            if not await admit(chosen.randrange(num_tenants)):
                raise RuntimeError("an admission was refused: the measurement is void")
            latencies.append(time.perf_counter() - started_s)

    started_s = time.perf_counter()
    await asyncio.gather(*(loop(n) for n in range(IN_FLIGHT)))
    return figures(latencies, time.perf_counter() - started_s)


async def pace(admit: Admit, num_tenants: int, seconds: float) -> Figures:
    """Start 300 a second, whatever the answers do."""
    latencies: list[float] = []

    async def one(tenant: int) -> None:
        started_s = time.perf_counter()
        await admit(tenant)
        latencies.append(time.perf_counter() - started_s)

    tasks = []
    started_s = time.perf_counter()
    for n in range(int(PACE * seconds)):
        await asyncio.sleep(max(0.0, started_s + n / PACE - time.perf_counter()))
        tasks.append(asyncio.create_task(one(n % num_tenants)))
    await asyncio.gather(*tasks)
    return figures(latencies, time.perf_counter() - started_s)


class Client(RateLimitClient):
    """The gateways' client, and the process it talks to."""

    pid: int


@contextlib.asynccontextmanager
async def running_service(
    server: LocalServer, redis_timeout_s: float = 1.0
) -> AsyncIterator[tuple[Client, str]]:
    """Run the real service as a process; give a client and the address."""
    ports = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace_ratelimit",
        env={
            **os.environ,
            "HEADRACE_RATELIMIT_LISTEN": f"127.0.0.1:{ports[0]}",
            "HEADRACE_RATELIMIT_METRICS_LISTEN": f"127.0.0.1:{ports[1]}",
            "HEADRACE_RATELIMIT_REDIS_URL": f"redis://127.0.0.1:{server.port}/0",
            "HEADRACE_RATELIMIT_REDIS_TIMEOUT_S": str(redis_timeout_s),
            "HEADRACE_TELEMETRY_LOG_LEVEL": "ERROR",
        },
    )
    client = Client(f"127.0.0.1:{ports[0]}", 10)
    client.pid = process.pid

    async def answers() -> bool:
        with contextlib.suppress(Exception):
            return not (await client.admit(request_of(0))).degraded
        return False

    try:
        await eventually(answers, within_s=60)
        yield client, f"127.0.0.1:{ports[0]}"
    finally:
        await client.close()
        # It may have been killed by then.
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def service(server: LocalServer) -> AsyncIterator[Way]:
    """Through the real service in a process of its own."""
    async with running_service(server) as (client, _):

        async def admit(tenant: int) -> bool:
            answer = await client.admit(request_of(tenant))
            return answer.outcome == ADMITTED and not answer.degraded

        yield admit, client.pid


@contextlib.asynccontextmanager
async def direct(server: LocalServer) -> AsyncIterator[Way]:
    """By redis-py: one call of the script per admission, on as many connections as needed."""
    pool = redis.asyncio.BlockingConnectionPool(port=server.port, max_connections=IN_FLIGHT)
    client = redis.asyncio.Redis(connection_pool=pool)
    name = library().name
    await client.function_load(library().text, replace=True)
    plans = Plans()

    async def admit(tenant: int) -> bool:
        op = admit_op(plans.of(request_of(tenant)))
        key, *args = call_args([op], has_ledger=False)
        ((outcome, *_),) = await client.fcall(name, 1, key, *args)
        return outcome == ADMITTED

    yield admit, None
    await client.aclose()
    await pool.aclose()


@contextlib.asynccontextmanager
async def limits_package(server: LocalServer) -> AsyncIterator[Way]:
    """By `limits`: a sliding counter per rate, a fixed window per budget; no leases."""
    from limits import RateLimitItemPerDay, RateLimitItemPerMinute, RateLimitItemPerMonth
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import FixedWindowRateLimiter, SlidingWindowCounterRateLimiter

    storage = RedisStorage(f"async+redis://127.0.0.1:{server.port}", implementation="redispy")
    rates, budgets = SlidingWindowCounterRateLimiter(storage), FixedWindowRateLimiter(storage)
    requests = RateLimitItemPerMinute(10**8)
    tokens = RateLimitItemPerMinute(10**10)
    day, month = RateLimitItemPerDay(10**15), RateLimitItemPerMonth(10**15)

    async def admit(tenant: int) -> bool:
        key = f"key-{tenant}"
        return (
            await rates.hit(requests, key, "requests", cost=1)
            and await rates.hit(tokens, key, "input", cost=700)
            and await rates.hit(tokens, key, "output", cost=300)
            and await budgets.hit(day, key, "day", cost=32_000)
            and await budgets.hit(month, key, "month", cost=32_000)
        )

    yield admit, None


async def measure(seconds: float) -> None:
    """Run everything and print it."""
    ways = {"service": service, "direct": direct}
    try:
        import limits  # noqa: F401 - only whether it is there

        ways["limits"] = limits_package
    except ImportError:
        print(PEER_HINT)
    for num_tenants in (1, 64):
        print(f"\n{IN_FLIGHT} in flight, {num_tenants} tenant(s), 6 dimensions")
        rows = {
            name: await one_way(name, way, flood, num_tenants, seconds)
            for name, way in ways.items()
        }
        for name in list(rows)[1:]:
            ratio = rows["service"].per_s / rows[name].per_s
            print(f"  service : {name} = {ratio:.2f}")
    print(f"\n{PACE} admits/s, 64 tenants")
    for name, way in ways.items():
        await one_way(name, way, pace, 64, seconds)


async def one_way(
    name: str,
    way: Callable[[LocalServer], contextlib.AbstractAsyncContextManager[Way]],
    load: Callable[[Admit, int, float], Awaitable[Figures]],
    num_tenants: int,
    seconds: float,
) -> Figures:
    """Measure one way on a fresh store."""
    with tempfile.TemporaryDirectory() as folder:
        server = valkey(Path(folder))
        server.start()
        try:
            async with way(server) as (admit, pid):
                await load(admit, num_tenants, seconds / 3)
                pids = {"client": os.getpid(), "store": server.pid}
                cpu = CpuTimes({**pids, **({"service": pid} if pid else {})})
                found = await load(admit, num_tenants, seconds)
                cost = cpu.per_call_us(found.num)
        finally:
            server.kill()
    print(f"  {name:8} {found}   {cost}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="time of each measurement")
    uvloop.run(measure(parser.parse_args().seconds))
