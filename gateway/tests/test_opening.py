"""When a stream is opened: refusals have a real status, and no silence is cut by proxies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace_testing.fake_worker import MODEL, FakeWorker, saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body

HI = [{"role": "user", "content": "hi"}]
STREAMS = {
    "/v1/chat/completions": chat_body(stream=True),
    "/v1/completions": {"model": MODEL, "prompt": "hi", "stream": True},
    "/v1/responses": {"model": MODEL, "input": "hi", "stream": True},
    "/v1/messages": {"model": MODEL, "messages": HI, "max_tokens": 9, "stream": True},
}
WHOLES = {path: {**body, "stream": False} for path, body in STREAMS.items()}
EMBEDDINGS = ("/v1/embeddings", {"model": MODEL, "input": "hi"})
SILENT_START_S = 1.0


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[GatewayFleet]:
    """One worker; comments are due long before a request that waits is refused."""
    fleet = GatewayFleet(tmp_path)
    fleet.settings = {"keep_alive_s": 0.1, "silent_start_s": SILENT_START_S}
    await fleet.start()
    fleet.worker.script = saying("Hello")
    yield fleet
    await fleet.close()


@pytest.mark.parametrize(
    ("path", "body"), [*STREAMS.items(), *WHOLES.items(), EMBEDDINGS], ids=lambda it: str(it)[:24]
)
async def test_a_request_that_waits_in_vain_is_refused_with_a_status(
    fleet: GatewayFleet, path: str, body: dict[str, Any]
) -> None:
    """No comment opens the stream meanwhile, and the wait ends before one must."""
    fleet.router.gate.clear()
    async with fleet.http() as client:
        refused = await client.post(path, json=body)
    assert refused.status_code == 503
    assert refused.headers["content-type"] == "application/json"
    assert refused.headers["retry-after"] == "2"
    assert fleet.router.picks[-1].max_queue_ms <= SILENT_START_S * 900
    await fleet.settled()


async def test_waits_of_several_attempts_are_one_wait(fleet: GatewayFleet) -> None:
    """A worker that is lost before it began does not start the bound anew."""
    await fleet.add_worker(FakeWorker(worker_id="w1"))
    for server in fleet.workers:
        server.worker.switches.die_after_tokens = 0
    async with fleet.http() as client:
        await client.post("/v1/chat/completions", json=chat_body(stream=True))
    first, second, *_ = (pick.max_queue_ms for pick in fleet.router.picks)
    assert second < first


@pytest.mark.parametrize(("path", "body"), STREAMS.items())
async def test_a_worker_that_never_begins_is_waited_for_with_comments(
    fleet: GatewayFleet, path: str, body: dict[str, Any]
) -> None:
    """The first comes before proxies would cut, and others follow."""
    fleet.worker.switches.never_begin = True
    began_s = time.monotonic()
    async with fleet.http() as client, client.stream("POST", path, json=body) as response:
        waited_s = time.monotonic() - began_s
        assert (response.status_code, waited_s >= 0.95 * SILENT_START_S) == (200, True)
        comments = [line async for line in _some_lines(response.aiter_lines(), 3)]
        assert all(line in {": keep-alive", "event: ping"} for line in comments)


async def test_a_stream_that_found_its_worker_may_wait_longer(fleet: GatewayFleet) -> None:
    """Once it is open, the router's own bound counts, and comments fill the silence."""
    await fleet.add_worker(FakeWorker(worker_id="w1"))
    for server in fleet.workers:
        server.worker.script = saying("Hello")
        server.worker.switches.hang_after_tokens = 2
    async with (
        fleet.http() as client,
        client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        fleet.router.gate.clear()
        taken = next(it for it in fleet.workers if it.worker.running)
        for server in fleet.workers:
            server.worker.switches.hang_after_tokens = None
        taken.worker.switches.die_after_tokens = 2
        taken.worker.switches.go_on.set()
        await asyncio.sleep(SILENT_START_S)
        fleet.router.gate.set()
        rest = [line async for line in lines]
    assert [pick.max_queue_ms > 0 for pick in fleet.router.picks] == [True, False]
    assert rest.count(": keep-alive") >= 3
    assert "data: [DONE]" in rest
    assert not any('"error"' in line for line in rest)


async def _some_lines(lines: AsyncIterator[str], num: int) -> AsyncIterator[str]:
    async for line in lines:
        if line.startswith((":", "event:")):
            yield line
            num -= 1
        if not num:
            return
