"""HTTP to a server that is somebody else's."""

import asyncio
from contextlib import suppress

import psutil

from headrace_testing.fake_openai import FakeOpenAi
from headrace_testing.waiting import eventually
from headrace_worker.upstream.client import UpstreamClient


async def test_who_leaves_at_any_moment_leaves_no_connection_open() -> None:
    """A request is cancelled one turn of the loop later each time, from its begin to its end."""
    process = psutil.Process()
    async with FakeOpenAi() as server:
        client = UpstreamClient(server.url, "", connect_timeout_s=5.0, silence_timeout_s=30.0)
        body = {"model": server.model, "messages": [], "max_tokens": 1}

        async def ask() -> None:
            async with client.stream("/chat/completions", body, "request") as chunks:
                async for _ in chunks:
                    pass

        num_files, num_ended = process.num_fds(), 0
        for num_turns in range(60):
            asking = asyncio.create_task(ask())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
                num_ended += 1
            await eventually(lambda: process.num_fds() == num_files)
        assert server.bodies
        await client.close()
    assert num_ended < 60
