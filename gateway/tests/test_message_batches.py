"""/v1/messages/batches over HTTP, with the SDK that applications use."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from headrace_contracts.types.v1.types_pb2 import PRIORITY_BATCH
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.batch_api import message_routes, stored_batches
from headrace_gateway.batch_api.message_lines import OutcomeCounts, result_line
from headrace_testing.batches import line, start
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually

PATH = "/v1/messages/batches"


def request(custom_id: str, **fields: Any) -> Any:
    params = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}], "max_tokens": 4}
    return {"custom_id": custom_id, "params": {**params, **fields}}


async def ended(client: anthropic.AsyncAnthropic, batch_id: str) -> Any:
    async def is_over() -> Any:
        batch = await client.messages.batches.retrieve(batch_id)
        assert batch.processing_status == "ended", batch
        return batch

    return await eventually(is_over, within_s=20, every_s=0.1)


async def results(client: anthropic.AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    """Return what came of each request, by its id; in order."""
    found: dict[str, Any] = {}
    async for one in await client.messages.batches.results(batch_id):
        assert one.custom_id not in found
        found[one.custom_id] = one.result
    return found


def booked(fleet: GatewayFleet) -> list[tuple[str, int]]:
    """Return the requests that the books have, with their tokens."""
    return sorted((it.request_id, it.usage.output_tokens) for it in fleet.usage.closed_events())


def told(good: list[Any]) -> list[tuple[str, int]]:
    """Return the requests that the results have, with their tokens."""
    return sorted(
        (it.message.id.replace("msg_", "req_"), it.message.usage.output_tokens) for it in good
    )


async def test_a_message_batch_from_requests_to_results(fleet: GatewayFleet) -> None:
    """One result a request; batch class, lowest priority, one bill."""
    asked = [request("a"), request("b", temperature=9), request("c", model="none"), request("d")]
    async with fleet.anthropic() as client:
        made = await client.messages.batches.create(requests=asked)
        assert made.id.startswith("msgbatch_")
        assert (made.type, made.processing_status) == ("message_batch", "in_progress")
        assert (made.request_counts.processing, made.request_counts.succeeded) == (4, 0)
        assert (made.expires_at - made.created_at).total_seconds() == 86_400
        assert (made.results_url, made.ended_at, made.cancel_initiated_at) == (None, None, None)
        batch = await ended(client, made.id)
        found = await results(client, made.id)
        raw = await client.messages.batches.with_raw_response.retrieve(made.id)
    assert raw.request_id == raw.headers["x-request-id"]
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 2, 2)
    assert (counts.canceled, counts.expired) == (0, 0)
    assert batch.ended_at >= batch.created_at
    assert list(found) == ["a", "b", "c", "d"]
    good = [found["a"], found["d"]]
    for one in good:
        assert one.type == "succeeded"
        assert one.message.content[0].text
        assert one.message.usage.service_tier == "batch"
    for name, kind in (("b", "invalid_request_error"), ("c", "not_found_error")):
        assert (found[name].type, found[name].error.error.type) == ("errored", kind)
        assert found[name].error.request_id.startswith("req_")
    assert "temperature" in found["b"].error.error.message
    assert booked(fleet) == told(good)
    assert {it.price_tier for it in fleet.usage.closed_events()} == {usage_pb2.PRICE_TIER_BATCH}
    assert {it.priority for it in fleet.worker.requests} == {PRIORITY_BATCH}


async def test_the_guard_judges_each_request_of_a_message_batch(fleet: GatewayFleet) -> None:
    """What it refuses is that request's result, and no model sees it."""
    fleet.guard.blocklist.append("canary")
    async with fleet.anthropic() as client:
        asked = [request("canary"), request("good")]
        made = await client.messages.batches.create(requests=asked)
        await ended(client, made.id)
        found = await results(client, made.id)
    assert found["good"].type == "succeeded"
    assert found["canary"].type == "errored"
    assert found["canary"].error.error.type == "invalid_request_error"
    assert len(fleet.worker.requests) == 1


async def test_a_message_batch_is_cancelled_and_deleted(fleet: GatewayFleet) -> None:
    """What is answered stays, the rest is told as canceled; only what has ended can be deleted."""
    fleet.worker.switches.delay_per_token_s = 0.1
    names = [f"r{idx}" for idx in range(30)]
    async with fleet.anthropic() as client:
        batches = client.messages.batches
        made = await batches.create(requests=[request(name) for name in names])
        await eventually(lambda: len(fleet.usage.closed_events()) >= 2, within_s=20)
        with pytest.raises(anthropic.BadRequestError, match="not ended"):
            await client.get(f"{PATH}/{made.id}/results", cast_to=object)
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            await batches.delete(made.id)
        first = await batches.cancel(made.id)
        assert first.processing_status in ("canceling", "ended")
        assert (await batches.cancel(made.id)).cancel_initiated_at == first.cancel_initiated_at
        batch = await ended(client, made.id)
        assert (await batches.cancel(made.id)).processing_status == "ended"
        found = await results(client, made.id)
        assert list(found) == names
        kinds = [one.type for one in found.values()]
        counts = batch.request_counts
        assert counts.succeeded == kinds.count("succeeded") >= 2
        assert counts.canceled == kinds.count("canceled") > 0
        assert counts.succeeded + counts.canceled == 30
        assert (await batches.delete(made.id)).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            await batches.retrieve(made.id)
    await fleet.settled()
    # Beside them, what was made of those that were cut off.
    paid = booked(fleet)
    assert set(told([one for one in found.values() if one.type == "succeeded"])) <= set(paid)
    assert len(dict(paid)) == len(paid)


async def test_a_message_batch_that_ended_by_itself_cannot_be_cancelled(
    fleet: GatewayFleet,
) -> None:
    """Whoever asks is told, in Anthropic's shape, and that it is of no use to ask again."""
    async with fleet.anthropic() as client:
        made = await client.messages.batches.create(requests=[request("a")])
        await ended(client, made.id)
        with pytest.raises(anthropic.ConflictError) as caught:
            await client.messages.batches.cancel(made.id)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caught.value.type == "invalid_request_error"


async def test_a_message_batch_expires(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not answered in time is told as expired."""
    monkeypatch.setattr(message_routes, "WINDOW_S", 2)
    fleet.worker.switches.refuse = True
    async with fleet.anthropic() as client:
        made = await client.messages.batches.create(requests=[request("a"), request("b")])
        batch = await ended(client, made.id)
        assert batch.request_counts.expired == 2
        assert [one.type for one in (await results(client, made.id)).values()] == ["expired"] * 2
    await fleet.settled()


async def test_a_revoked_key_ends_its_message_batch(fleet: GatewayFleet) -> None:
    """What was answered can still be had by the project's other keys; the rest says why not."""
    fleet.worker.switches.delay_per_token_s = 0.05
    mine, key = fleet.new_key(project_id=fleet.key.project_id)
    async with fleet.anthropic(mine) as owner, fleet.anthropic() as client:
        asked = [request(f"r{idx}") for idx in range(20)]
        made = await owner.messages.batches.create(requests=asked)
        await eventually(lambda: len(fleet.usage.closed_events()) >= 2, within_s=20)
        fleet.billing.revoke(key.key_id)
        batch = await ended(client, made.id)
        found = list((await results(client, made.id)).values())
    rest = [one.error.error for one in found if one.type == "errored"]
    assert batch.request_counts.errored == len(rest) > 0
    assert {one.type for one in rest} == {"authentication_error"}
    assert "key" in rest[0].message
    await fleet.settled()


async def test_a_message_batch_survives_its_gateway(fleet_parts: GatewayFleet) -> None:
    """Another process goes on: answered requests stay, each has one result and one bill."""
    await fleet_parts.start()
    fleet_parts.worker.switches.delay_per_token_s = 0.05
    names = [f"r{idx}" for idx in range(12)]
    async with fleet_parts.anthropic() as client:
        made = await client.messages.batches.create(requests=[request(name) for name in names])
        await eventually(lambda: len(fleet_parts.usage.closed_events()) >= 2, within_s=20)
    await fleet_parts.restart_gateway()
    fleet_parts.worker.switches.delay_per_token_s = 0.0
    async with fleet_parts.anthropic() as client:
        batch = await ended(client, made.id)
        found = await results(client, made.id)
    assert batch.request_counts.succeeded == 12
    assert list(found) == names
    assert booked(fleet_parts) == told(list(found.values()))
    await fleet_parts.close()


async def test_message_batches_are_listed_both_ways(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newest first; on from one or back from one; a page may hold less than was asked for."""
    monkeypatch.setattr(message_routes, "_MAX_PAGE", 2)
    async with fleet.anthropic() as client:
        batches = client.messages.batches
        made = [(await batches.create(requests=[request("a")])).id for _ in range(5)][::-1]
        assert [one.id async for one in batches.list()] == made
        assert [one.id async for one in batches.list(limit=1)] == made
        assert [one.id async for one in batches.list(before_id=made[4], limit=2)] == [
            made[idx] for idx in (2, 3, 0, 1)
        ]
        assert [one.id async for one in client.beta.messages.batches.list()] == made
        page = await batches.list(before_id=made[1])
        assert ([one.id for one in page.data], page.has_more) == ([made[0]], False)
        with pytest.raises(anthropic.NotFoundError, match="before_id"):
            await batches.list(before_id="msgbatch_none")
        with pytest.raises(anthropic.BadRequestError, match="either"):
            await batches.list(before_id=made[1], after_id=made[2])


async def test_each_sees_batches_of_his_own_and_of_the_api_he_asks(fleet: GatewayFleet) -> None:
    """Neither another tenant's, nor OpenAI's where Anthropic's are asked for."""
    other, _ = fleet.new_key(tenant_id="rival")
    async with (
        fleet.openai() as openai_client,
        fleet.anthropic() as client,
        fleet.anthropic(other) as rival,
    ):
        mine = (await client.messages.batches.create(requests=[request("a")])).id
        file_batch = await start(openai_client, line("a"))
        await ended(client, mine)
        batches = rival.messages.batches
        assert [one.id async for one in batches.list()] == []
        for call in (batches.retrieve, batches.cancel, batches.delete, batches.results):
            with pytest.raises(anthropic.NotFoundError):
                await call(mine)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.retrieve(file_batch)
        with pytest.raises(openai.NotFoundError):
            await openai_client.batches.retrieve(mine)
        assert [one.id async for one in openai_client.batches.list()] == [file_batch]
        assert [one.id async for one in client.messages.batches.list()] == [mine]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "requests"),
        ({"requests": []}, "requests"),
        ({"requests": [request("a"), request("a")]}, "requests[1].custom_id"),
        ({"requests": [request("not one")]}, "requests[0].custom_id"),
        ({"requests": [request("a\n")]}, "requests[0].custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "requests[0].params"),
        ({"requests": [{"custom_id": "a", "params": []}]}, "requests[0].params"),
        ({"requests": [request("a", stream=True)]}, "requests[0].params.stream"),
        ({"requests": [{"custom_id": "a", "params": {}}] * 50_001}, "requests: Expected array"),
        ({"requests": [request("a")], "metadata": {}}, "metadata"),
    ],
)
async def test_wrong_message_batches_are_refused(
    fleet: GatewayFleet, body: Any, named: str
) -> None:
    """As a whole and by the name of the field; what is wrong in a body, its result tells."""
    async with fleet.anthropic() as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.post(PATH, body=body, cast_to=object)
        assert named in caught.value.body["error"]["message"]  # type: ignore[index]
        assert [one async for one in client.messages.batches.list()] == []
    assert fleet.worker.requests == []


async def test_a_project_has_so_many_batches_under_way(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever API made them; one more is told to wait."""
    monkeypatch.setattr(stored_batches, "MAX_ACTIVE", 2)
    fleet.worker.switches.delay_per_token_s = 1.0
    async with fleet.openai() as openai_client, fleet.anthropic() as client:
        batches = client.messages.batches
        made = await batches.create(requests=[request("a")])
        file_batch = await start(openai_client, line("a"))
        with pytest.raises(anthropic.RateLimitError, match="2 batches") as caught:
            await batches.create(requests=[request("a")])
        assert caught.value.response.headers["retry-after"] == "60"
        await openai_client.batches.cancel(file_batch)
        await batches.cancel(made.id)
        await ended(client, made.id)
        await batches.create(requests=[request("a")])


async def test_a_message_batch_sent_twice_is_one(fleet: GatewayFleet) -> None:
    """With the same Idempotency-Key."""
    once = {"Idempotency-Key": "k"}
    async with fleet.anthropic() as client:
        batches = client.messages.batches
        asked = [request("a")]
        ids = {(await batches.create(requests=asked, extra_headers=once)).id for _ in range(2)}
        assert [one.id async for one in batches.list()] == list(ids)
        await ended(client, *ids)
    assert len(fleet.usage.closed_events()) == 1


def test_outcomes_are_told_in_anthropics_words() -> None:
    """Each line that is kept becomes a result, and is counted as what it tells."""
    answered = {"status_code": 200, "body": {"id": "msg_1"}}
    refused = {"status_code": 404, "body": {"type": "error"}}
    kept: list[dict[str, Any]] = [
        {"response": answered, "error": None},
        {"response": refused, "error": None},
        {"response": None, "error": {"code": "batch_cancelled", "message": "m"}},
        {"response": None, "error": {"code": "batch_expired", "message": "m"}},
        {"response": None, "error": {"code": "batch_failed", "message": "m"}},
    ]
    counts, lines = OutcomeCounts(), []
    for one in kept:
        raw = json.dumps({"custom_id": "a", **one}).encode()
        counts.add(raw)
        lines.append(json.loads(result_line(raw)))
    assert [one["result"]["type"] for one in lines] == [
        "succeeded", "errored", "canceled", "expired", "errored",
    ]  # fmt: skip
    assert lines[0]["result"]["message"] == {"id": "msg_1"}
    assert lines[1]["result"]["error"] == {"type": "error"}
    assert lines[4]["result"]["error"]["error"]["message"] == "m"
    assert counts.as_json() == {
        "processing": 0, "succeeded": 1, "errored": 2, "canceled": 1, "expired": 1,
    }  # fmt: skip
