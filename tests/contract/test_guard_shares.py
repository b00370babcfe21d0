"""A guard's threads are its tenants' together: a real process, one floods, another is judged."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_testing.waiting import eventually, free_port
from headrace_testing.web import fetch

SERVICE = pb.DESCRIPTOR.services_by_name["Guard"]
CHECK_INPUT = method_ref(SERVICE, "CheckInput", pb.CheckInputRequest, pb.CheckInputResponse)
CHECK_OUTPUT = method_ref(SERVICE, "CheckOutput", pb.CheckOutputRequest, pb.CheckOutputResponse)
# More than run and wait in a guard as it is packaged.
NUM_IN_FLIGHT = 100
FLOOD_S = 3.0
TEXT = "The harbour is wide, and we sail home with salt and fish while it rains. " * 250


@dataclass
class Guard:
    """A guard process and who asks it.

    Args:
        client: a session with it.
        metrics_url: of its metrics.
    """

    client: SessionClient
    metrics_url: str
    num_asked: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def _new_text(self) -> str:
        # Never the same: a verdict that is kept needs no thread.
        self.num_asked += 1
        return f"{self.num_asked} {TEXT}"

    async def judge_input(self, tenant_id: str) -> pb.Verdict:
        """Ask about a request of one long text."""
        part = pb.TextPart(path="prompt", trust=pb.TRUST_USER, text=self._new_text())
        request = pb.CheckInputRequest(request_id="r", tenant_id=tenant_id, parts=[part])
        return (await self.client.unary(CHECK_INPUT, request, timeout_s=60)).verdict

    async def judge_output(self, tenant_id: str) -> pb.CheckOutputResponse:
        """Ask about an answer that comes in one long piece."""
        async with await self.client.start(CHECK_OUTPUT, timeout_s=60) as call:
            opened = pb.OutputOpen(request_id="r", tenant_id=tenant_id)
            call.send(pb.CheckOutputRequest(open=opened))
            text = pb.OutputText(text=self._new_text(), last=True)
            call.send(pb.CheckOutputRequest(text=text))
            answer = await call.receive()
            assert answer is not None
            return answer

    async def flood(self, until_s: float) -> None:
        """Ask again as soon as there is an answer."""
        while time.monotonic() < until_s:
            verdict = await self.judge_input("flood")
            if verdict.action == pb.ACTION_UNAVAILABLE:
                self.refused[verdict.reason] += 1
                await asyncio.sleep(0.02)


@pytest.fixture
async def guard(tmp_path: Path) -> AsyncIterator[Guard]:
    """A process with the packaged settings, but for time: this machine may be slow."""
    port, metrics_port = free_port(), free_port()
    environment = {
        "HEADRACE_GUARD_LISTEN": f"127.0.0.1:{port}",
        "HEADRACE_GUARD_METRICS_LISTEN": f"127.0.0.1:{metrics_port}",
        "HEADRACE_GUARD_CHECK_BUDGET_S": "60",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace_guard",
        env=os.environ | environment,
        cwd=tmp_path,
        stderr=asyncio.subprocess.DEVNULL,
    )
    client = SessionClient(f"127.0.0.1:{port}")
    url = f"http://127.0.0.1:{metrics_port}"

    async def ready() -> bool:
        return (await asyncio.to_thread(fetch, f"{url}/ready"))[0] == 200

    try:
        await eventually(ready, within_s=60)
        yield Guard(client, f"{url}/metrics")
    finally:
        await client.close()
        process.terminate()
        await process.wait()


async def test_a_flood_of_long_texts_is_its_senders_own(guard: Guard) -> None:
    """It fills the queue and is refused; others' texts are judged, and its own answers are."""
    for _ in range(5):
        await guard.judge_input("one")
    alone_s: list[float] = []
    for _ in range(5):
        started_s = time.monotonic()
        await guard.judge_input("one")
        alone_s.append(time.monotonic() - started_s)
    until_s = time.monotonic() + FLOOD_S
    flood = [asyncio.create_task(guard.flood(until_s)) for _ in range(NUM_IN_FLIGHT)]
    await eventually(lambda: guard.refused.total() > 0, within_s=30)
    beside_s: list[float] = []
    while time.monotonic() < until_s or len(beside_s) < 3:
        started_s = time.monotonic()
        verdict = await guard.judge_input("one")
        beside_s.append(time.monotonic() - started_s)
        assert verdict.action == pb.ACTION_ALLOW, verdict.reason
        for tenant_id in ("one", "flood"):
            answer = await guard.judge_output(tenant_id)
            assert answer.verdict.action != pb.ACTION_UNAVAILABLE, answer.verdict.reason
            assert answer.last
        await asyncio.sleep(0.1)
    await asyncio.gather(*flood)
    # Beside those that run, not behind all that wait: some three to six times as long is usual.
    assert statistics.median(beside_s) < 20 * statistics.median(alone_s)
    (reason,) = guard.refused
    assert "who has most of them is refused first" in reason
    counted = (await asyncio.to_thread(fetch, guard.metrics_url))[1]
    series = 'headrace_guard_not_evaluated_total{direction="input",reason="overloaded"}'
    assert f"{series} {float(guard.refused.total())}" in counted
