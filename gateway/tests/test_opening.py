"""When a stream is opened: refusals have a real status, and no silence is cut by proxies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace_common.errors import QueueFull
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body

HI = [{"role": "user", "content": "hi"}]
STREAMS = {
    "/v1/chat/completions": chat_body(stream=True),
    "/v1/completions": {"model": MODEL, "prompt": "hi", "stream": True},
    "/v1/responses": {"model": MODEL, "input": "hi", "stream": True},
    "/v1/messages": {"model": MODEL, "messages": HI, "max_tokens": 9, "stream": True},
}
WHOLES = {path: {**body, "stream": False} for path, body in STREAMS.items()}
ENDS = ("data: [DONE]", "event: response.completed", "event: message_stop")
EMBEDDINGS = ("/v1/embeddings", {"model": MODEL, "input": "hi"})
SILENT_START_S = 1.0


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[GatewayFleet]:
    """One worker; the first comment is due long before a stream may be opened by it."""
    fleet = GatewayFleet(tmp_path)
    fleet.settings = {"keep_alive_s": 0.1, "silent_start_s": SILENT_START_S}
    await fleet.start()
    fleet.worker.script = saying("Hello")
    yield fleet
    await fleet.close()


@pytest.mark.parametrize(
    ("path", "body"), [*STREAMS.items(), *WHOLES.items(), EMBEDDINGS], ids=lambda it: str(it)[:24]
)
async def test_a_queue_that_refuses_early_does_so_with_a_status(
    fleet: GatewayFleet, path: str, body: dict[str, Any]
) -> None:
    """No comment opens the stream meanwhile, though many were due."""
    fleet.router.gate.clear()
    fleet.router.refuse_behind_gate = QueueFull("No replica came free.", retry_after_s=2.0)
    asyncio.get_running_loop().call_later(SILENT_START_S / 2, fleet.router.gate.set)
    async with fleet.http() as client:
        refused = await client.post(path, json=body)
    assert refused.status_code == 503
    assert refused.headers["content-type"] == "application/json"
    assert refused.headers["retry-after"] == "2"
    await fleet.settled()


@pytest.mark.parametrize(("path", "body"), STREAMS.items())
async def test_a_long_wait_in_the_queue_gets_comments(
    fleet: GatewayFleet, path: str, body: dict[str, Any]
) -> None:
    """Nobody is refused for it, and no proxy cuts what is silent."""
    fleet.router.gate.clear()
    async with fleet.http() as client, client.stream("POST", path, json=body) as response:
        lines = response.aiter_lines()
        comments = [line async for line in _some_lines(lines, 3)]
        assert all(line in {": keep-alive", "event: ping"} for line in comments)
        fleet.router.gate.set()
        rest = [line async for line in lines]
    # An error's stream ends otherwise.
    assert '"error":{' not in "".join(rest)
    assert any(line in ENDS for line in rest)


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


async def _some_lines(lines: AsyncIterator[str], num: int) -> AsyncIterator[str]:
    async for line in lines:
        if line.startswith((":", "event:")):
            yield line
            num -= 1
        if not num:
            return
