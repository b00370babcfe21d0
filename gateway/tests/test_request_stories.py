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


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ({"X-Client-Request-Id": "job 7/a"}, "job 7/a"),
        ({"X-Request-Id": "proxy"}, "proxy"),
        ({"X-Request-Id": "proxy", "X-Client-Request-Id": "mine"}, "mine"),
        ({"X-Request-Id": "p" * 513}, None),
        ({"X-Client-Request-Id": "c" * 512}, "c" * 512),
        ({}, None),
    ],
)
@pytest.mark.parametrize("more", [{}, {"Idempotency-Key": "k"}])
async def test_a_clients_own_id_is_told(
    fleet: GatewayFleet, sent: dict[str, str], told: str | None, more: dict[str, str]
) -> None:
    """Beside ours, which stays the one of the answer."""
    async with fleet.http() as client:
        headers = {**sent, **more}
        answer = await client.post("/v1/chat/completions", json=chat_body(), headers=headers)
        request_id = answer.headers["x-request-id"]
        story = (await client.get(f"/v1/requests/{request_id}")).json()
    assert request_id.startswith("req_")
    assert story["client_request_id"] == told


async def test_a_clients_id_that_is_no_plain_text_is_refused(
    fleet: GatewayFleet, caplog: pytest.LogCaptureFixture
) -> None:
    """As OpenAI refuses it; a good one stands in the log of what fails."""
    fleet.worker.switches.refuse = True
    async with fleet.http() as client:

        async def ask(client_id: bytes) -> dict[str, str]:
            headers = {"X-Client-Request-Id": client_id}
            answer = await client.post("/v1/chat/completions", json=chat_body(), headers=headers)
            error: dict[str, str] = answer.json()["error"]
            return error

        for wrong in (b"c" * 513, "é".encode(), b"a\tb"):
            error = await ask(wrong)
            assert (error["param"], error["code"]) == ("X-Client-Request-Id", "invalid_request")
        assert (await ask(b"mine"))["type"] == "service_unavailable"
    assert "(of its client: mine): " in caplog.text


async def test_a_request_that_cannot_be_looked_up_is_not_unknown(fleet: GatewayFleet) -> None:
    """While billing is away only what is not known here gets 503, never 404."""
    async with fleet.http() as client:
        answer = await client.post("/v1/chat/completions", json=chat_body())
        request_id = answer.headers["x-request-id"]
        fleet.billing.failure = Unavailable("away")
        assert (await client.get(f"/v1/requests/{request_id}")).status_code == 200
        assert (await client.get("/v1/requests/req_nope")).status_code == 503


async def test_another_gateway_tells_a_story_at_once(fleet: GatewayFleet) -> None:
    """Behind a balancer nobody knows which one answers; what is written soon is waited for."""
    other = await fleet.add_gateway()
    async with fleet.http() as client:
        answer = await client.post("/v1/chat/completions", json=chat_body())
        request_id = answer.headers["x-request-id"]
        story = await client.get(f"http://127.0.0.1:{other.port}/v1/requests/{request_id}")
    assert story.status_code == 200
    assert story.json()["timing"]["duration_s"] > 0


async def test_a_story_outlives_its_process(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the state did not take at once waits, and is written at the end at the latest."""
    is_refused = asyncio.Event()

    async def refuse(_work: object, _whose: str = "") -> None:
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
