"""GET /v1/requests/{id}: the story of a request, to its owner."""

from __future__ import annotations

import asyncio

import pytest

from headrace_common.errors import Unavailable
from headrace_testing.fake_worker import saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body


async def test_a_requests_story(fleet: GatewayFleet) -> None:
    """Time, tokens, replica, reasons; also from the state, after this process forgot it."""
    fleet.worker.script = saying("Hello")
    other, _ = fleet.new_key(tenant_id="rival")
    async with fleet.http() as client, fleet.http(other) as rival:
        answer = await client.post(
            "/v1/chat/completions", json=chat_body(user="u1", metadata={"job": "7"})
        )
        request_id = answer.headers["x-request-id"]
        assert answer.headers["x-headrace-queue-ms"] == "0"
        story = (await client.get(f"/v1/requests/{request_id}")).json()
        assert (await rival.get(f"/v1/requests/{request_id}")).status_code == 404
        assert (await client.get("/v1/requests/req_nope")).status_code == 404
        assert (await client.get("/v1/requests/req_nope")).json()["error"]["param"] == "request_id"
        await fleet.gateway.stories.flush()
    assert story["id"] == request_id
    assert (story["endpoint"], story["ending"]) == ("chat", "completed")
    assert story["tokens"]["output"] == len("Hello") + 1
    assert story["replicas"] == ["w0"]
    assert {"guard", "tokenise", "admit"} <= set(story["timing"]["stages_s"])
    assert story["timing"]["duration_s"] > 0
    assert story["routing"]["replica"] == "w0"
    assert story["labels"] == {"user": "u1", "metadata": {"job": "7"}}
    assert story["guard"] == {"input": "passed", "output": "passed"}
    await fleet.restart_gateway()
    async with fleet.http() as client, fleet.http(other) as rival:
        again = (await client.get(f"/v1/requests/{request_id}")).json()
        assert again["timing"] == story["timing"]
        assert (await rival.get(f"/v1/requests/{request_id}")).status_code == 404


async def test_a_request_that_cannot_be_looked_up_is_not_unknown(fleet: GatewayFleet) -> None:
    """While billing is away only what is not known here gets 503, never 404."""
    async with fleet.http() as client:
        answer = await client.post("/v1/chat/completions", json=chat_body())
        request_id = answer.headers["x-request-id"]
        fleet.billing.failure = Unavailable("away")
        assert (await client.get(f"/v1/requests/{request_id}")).status_code == 200
        assert (await client.get("/v1/requests/req_nope")).status_code == 503


async def test_a_story_outlives_its_process(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the state did not take at once waits, and is written at the end at the latest."""
    is_refused = asyncio.Event()

    async def refuse(_work: object) -> None:
        is_refused.set()
        raise Unavailable("away")

    monkeypatch.setattr(fleet.gateway.stories._state, "write", refuse)
    async with fleet.http() as client:
        answer = await client.post("/v1/chat/completions", json=chat_body())
        request_id = answer.headers["x-request-id"]
    await is_refused.wait()
    monkeypatch.undo()
    await fleet.restart_gateway()
    async with fleet.http() as client:
        told = (await client.get(f"/v1/requests/{request_id}")).json()
    assert told["timing"]["duration_s"] > 0
