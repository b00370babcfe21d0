"""/v1/responses: streams that fail once their response was told of."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace_common.errors import Unavailable
from headrace_contracts.usage.v1 import usage_pb2
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually

TOKENS = 4


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[GatewayFleet]:
    """One worker, which stops after some tokens until something happens; no second try."""
    fleet = GatewayFleet(tmp_path)
    fleet.settings = {
        "max_attempts": 1,
        "drain_grace_s": 1.0,
        "keep_alive_s": 0.05,
        "silent_start_s": 0.5,
    }
    await fleet.start()
    fleet.worker.script = saying("the heron is late")
    fleet.worker.switches.hang_after_tokens = TOKENS
    yield fleet
    await fleet.close()


async def failing(fleet: GatewayFleet, cause: str, **fields: Any) -> list[Any]:
    """Ask, let *cause* happen once there is text, and return all events."""
    events: list[Any] = []
    async with fleet.openai() as client:
        asked: dict[str, Any] = {"model": MODEL, "input": "hi", **fields}
        async for event in await client.responses.create(**asked, stream=True):
            is_new = event.type not in {it.type for it in events}
            events.append(event)
            if is_new and event.type == "response.output_text.delta":
                _let_happen(fleet, cause)
    return events


def _let_happen(fleet: GatewayFleet, cause: str) -> None:
    if cause == "stop":
        fleet.lifecycle.stopping.set()
        return
    fleet.guard.switches.refuse = cause == "guard"
    if cause == "engine":
        fleet.worker.switches.die_after_tokens = TOKENS
    fleet.worker.switches.go_on.set()


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        ("engine", "no_replica"),
        ("guard", "guard_unavailable"),
        ("stop", "service_unavailable"),
    ],
)
async def test_a_failed_stream_says_so_and_is_found(
    fleet: GatewayFleet, cause: str, code: str
) -> None:
    """The last event carries the response as it is kept; what was made is billed."""
    *events, last = await failing(fleet, cause)
    assert (last.type, last.response.status, last.response.error.code) == (
        "response.failed",
        "failed",
        code,
    )
    numbers = [it.sequence_number for it in (*events, last)]
    assert numbers == list(range(len(numbers)))
    assert "error" not in {it.type for it in events}
    (closed,) = await eventually(fleet.usage.closed_events)
    assert closed.ending == usage_pb2.ENDING_FAILED
    assert closed.usage.output_tokens >= TOKENS
    if cause == "stop":
        await fleet.running
        await fleet.restart_gateway()
    async with fleet.openai() as client:
        kept = await client.responses.retrieve(events[0].response.id)
        assert kept.model_dump() == last.response.model_dump()
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="x", previous_response_id=kept.id)
    assert caught.value.param == "previous_response_id"


async def test_it_is_told_as_in_the_background(fleet: GatewayFleet) -> None:
    """The same fields, but for what names the request."""
    told = []
    for is_background in (False, True):
        fleet.worker.switches.die_after_tokens = None
        fleet.worker.switches.go_on.clear()
        last = (await failing(fleet, "engine", background=is_background))[-1]
        assert last.type == "response.failed"
        told.append(last.response.model_dump(exclude={"id", "created_at", "background"}))
        assert told[-1]["error"].pop("message").startswith("No replica could finish")
    assert told[0] == told[1]


async def test_one_that_is_not_stored_is_not_found(fleet: GatewayFleet) -> None:
    """`store: false` holds for a failure too."""
    last = (await failing(fleet, "engine", store=False))[-1]
    assert (last.type, last.response.store) == ("response.failed", False)
    async with fleet.openai() as client:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(last.response.id)


async def test_one_that_cannot_be_stored_says_that_too(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is away: the failure is told all the same, as not stored."""

    async def refuse(_work: object, _whose: str = "") -> None:
        raise Unavailable("away")

    monkeypatch.setattr(fleet.gateway._state, "write", refuse)
    last = (await failing(fleet, "engine"))[-1]
    assert (last.type, last.response.store) == ("response.failed", False)


async def test_a_failed_stream_is_no_answer_to_repeat(fleet: GatewayFleet) -> None:
    """An Idempotency-Key lets it be tried anew; the failed response stays beside the good one."""
    headers = {"Idempotency-Key": "k1"}
    failed = (await failing(fleet, "engine", extra_headers=headers))[-1].response
    fleet.worker.switches.die_after_tokens = None
    *_, last = await failing(fleet, "nothing", extra_headers=headers)
    async with fleet.openai() as client:
        found = [await client.responses.retrieve(it.id) for it in (failed, last.response)]
    assert [it.status for it in found] == ["failed", "completed"]


async def test_before_it_is_told_of_it_is_an_error(fleet: GatewayFleet) -> None:
    """Only a comment went out while no worker began: an error event, and nothing is kept."""
    fleet.worker.switches.never_begin = True
    body = {"model": MODEL, "input": "hi", "stream": True}
    async with (
        fleet.http() as client,
        client.stream("POST", "/v1/responses", json=body) as answer,
    ):
        text = ""
        async for piece in answer.aiter_text():
            text += piece
            fleet.lifecycle.stopping.set()
    assert text.startswith(": keep-alive\n\n")
    (event,) = [it for it in text.split("\n\n") if it.startswith("event: ")]
    assert event.startswith("event: error\n")
    assert '"sequence_number":0' in event
    await fleet.running


async def test_a_failure_that_is_not_streamed_is_a_status(fleet: GatewayFleet) -> None:
    """As for any request."""
    fleet.worker.switches.die_after_tokens = 2
    async with fleet.http() as client:
        answer: httpx.Response = await client.post(
            "/v1/responses", json={"model": MODEL, "input": "hi"}
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
