"""What a request made is freed with it: nothing of it is held in a ring of references.

A ring waits for the garbage collector, which then looks through all that waits at once: that was a
third of the gateway's CPU and pauses of tens of milliseconds.
"""

from __future__ import annotations

import gc

import pytest

from headrace_gateway.answer import Answer
from headrace_gateway.http_exchange import HttpExchange
from headrace_gateway.visit import Visit
from headrace_testing.fake_worker import saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually


def _num_alive() -> int:
    # By type: isinstance asks odd objects of other libraries for their class, and some warn.
    return sum(type(it) in (Visit, Answer, HttpExchange) for it in gc.get_objects())


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"max_tokens": 0}])
async def test_a_request_leaves_nothing_to_the_collector(
    fleet: GatewayFleet, fields: dict[str, object]
) -> None:
    """With the collector off nothing of an answered or refused request stays."""
    fleet.worker.script = saying("Hello")
    async with fleet.http() as client:
        await client.post("/v1/chat/completions", json=chat_body())
        gc.collect()
        before = _num_alive()
        gc.disable()
        try:
            for _ in range(5):
                await client.post("/v1/chat/completions", json=chat_body(**fields))
            await eventually(lambda: _num_alive() <= before)
        finally:
            gc.enable()
