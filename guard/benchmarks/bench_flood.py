"""How long one tenant's text takes beside another's flood, at a real guard process.

``python guard/benchmarks/bench_flood.py [--chars N] [--in-flight N] [--seconds S]`` sends long
texts, each a new one, with that many in flight (a refused one is sent again after 50 ms), and
beside them one text of another tenant at a time, five a second. It prints what came of both, and
what a text takes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections import Counter

from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_testing.waiting import eventually, free_port
from headrace_testing.web import fetch

_SERVICE = pb.DESCRIPTOR.services_by_name["Guard"]
_CHECK = method_ref(_SERVICE, "CheckInput", pb.CheckInputRequest, pb.CheckInputResponse)
_SENTENCE = "The sea is wide and we sail home with a cargo of salt fish while rain falls. "
_NUM_ALONE = 20


class Guard:
    """Asks a guard and counts what it says, by tenant.

    Args:
        client: a session with it.
        num_chars: length of each text.
    """

    def __init__(self, client: SessionClient, num_chars: int) -> None:
        self._client, self._numbers = client, itertools.count()
        self._text = (_SENTENCE * (num_chars // len(_SENTENCE) + 1))[:num_chars]
        self.said: dict[str, Counter[str]] = {"flood": Counter(), "other": Counter()}
        self.took_s: list[float] = []

    async def ask(self, tenant_id: str) -> bool:
        """Have one text judged; return whether it was."""
        text = f"{next(self._numbers)} {self._text}"
        part = pb.TextPart(path="prompt", trust=pb.TRUST_USER, text=text)
        request = pb.CheckInputRequest(request_id="r", tenant_id=tenant_id, parts=[part])
        started_s = time.monotonic()
        verdict = (await self._client.unary(_CHECK, request, timeout_s=30)).verdict
        if tenant_id == "other":
            self.took_s.append(time.monotonic() - started_s)
        self.said[tenant_id][verdict.reason or "judged"] += 1
        return not verdict.reason

    async def flood(self, until_s: float) -> None:
        """Ask for as long as that."""
        while time.monotonic() < until_s:
            if not await self.ask("flood"):
                await asyncio.sleep(0.05)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


async def _measure(guard: Guard, num_in_flight: int, seconds_s: float) -> None:
    for _ in range(_NUM_ALONE):
        await guard.ask("other")
    _print(f"alone:  {statistics.median(guard.took_s) * 1000:.1f} ms at the median")
    guard.took_s.clear()
    guard.said["other"].clear()
    until_s = time.monotonic() + seconds_s
    flood = [asyncio.create_task(guard.flood(until_s)) for _ in range(num_in_flight)]
    await asyncio.sleep(0.5)
    while time.monotonic() < until_s:
        await guard.ask("other")
        await asyncio.sleep(0.2)
    await asyncio.gather(*flood)
    median_s, longest_s = statistics.median(guard.took_s), max(guard.took_s)
    _print(f"beside: {median_s * 1000:.1f} ms at the median, {longest_s * 1000:.1f} at most")
    for tenant_id, said in guard.said.items():
        _print(f"{tenant_id}: {', '.join(f'{num} {what}' for what, num in said.items())}")


async def _main(num_chars: int, num_in_flight: int, seconds_s: float) -> None:
    port, metrics_port = free_port(), free_port()
    environment = {
        "HEADRACE_GUARD_LISTEN": f"127.0.0.1:{port}",
        "HEADRACE_GUARD_METRICS_LISTEN": f"127.0.0.1:{metrics_port}",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace_guard",
        env=os.environ | environment,  # noqa: TID251 - the process inherits the rest
        stderr=asyncio.subprocess.DEVNULL,
    )
    client = SessionClient(f"127.0.0.1:{port}")

    async def is_ready() -> bool:
        url = f"http://127.0.0.1:{metrics_port}/ready"
        return (await asyncio.to_thread(fetch, url))[0] == 200

    try:
        await eventually(is_ready, within_s=60)
        await _measure(Guard(client, num_chars), num_in_flight, seconds_s)
    finally:
        await client.close()
        process.terminate()
        await process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--chars", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    asyncio.run(_main(given.chars, given.in_flight, given.seconds))
