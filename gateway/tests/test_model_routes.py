"""Model routes at the public API: who serves, who steps in, what is told and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_contracts.billing.v1.billing_pb2 import Price
from headrace_contracts.usage.v1.usage_pb2 import ENDING_COMPLETED
from headrace_testing.fake_worker import MODEL, FakeWorker, saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually

SPARE = "spare-model"
ROUTES = f"""
version = 1
revision = "first"
[routes."gpt-4o"]
model = "{MODEL}"
fallbacks = ["nobody-serves-this", "{SPARE}"]
start_timeout_s = 0.2
[routes.even]
split = [{{ model = "{MODEL}", weight = 1 }}, {{ model = "{SPARE}", weight = 1 }}]
[routes.gone]
model = "nobody-serves-this"
"""


@pytest.fixture
async def fleet(fleet_parts: GatewayFleet) -> AsyncIterator[GatewayFleet]:
    """Two models behind a file of routes."""
    path = fleet_parts.folder / "routes.toml"
    path.write_text(ROUTES)
    fleet_parts.settings["model_routes_file"] = path
    await fleet_parts.start()
    fleet_parts.worker.script = saying("main")
    await fleet_parts.add_worker(FakeWorker("spare", model=SPARE, script=saying("spare")))
    directory = fleet_parts.gateway.directory
    await eventually(lambda: len(directory.cards()) == 2)
    yield fleet_parts
    await fleet_parts.close()


async def test_an_alias_is_served_booked_and_told_as_its_model(fleet: GatewayFleet) -> None:
    """The answer, the ledger and the story name the model; a name that is nobody's stays a 404."""
    async with fleet.http() as client:
        answer = await client.post("/v1/chat/completions", json=chat_body(model="gpt-4o"))
        assert answer.json()["model"] == MODEL
        assert answer.headers["x-headrace-model"] == MODEL
        assert answer.headers["x-headrace-route"] == "gpt-4o; kind=alias"
        story = (await client.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()
        assert story["route"] == {
            "asked": "gpt-4o", "kind": "alias", "model": MODEL, "revision": "first", "failed": [],
        }  # fmt: skip
        unknown = await client.post("/v1/chat/completions", json=chat_body(model="gpt-9"))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        gone = await client.post("/v1/chat/completions", json=chat_body(model="gone"))
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "no_replica")
        tokens = await client.post("/tokenize", json={"model": "gpt-4o", "prompt": "hi"})
        assert tokens.json()["count"] == 2
    await fleet.settled()
    assert [event.model for event in fleet.usage.events] == [MODEL, MODEL]


async def test_what_a_key_may_use_is_what_it_sees(fleet: GatewayFleet) -> None:
    """An alias in a key's list opens the alias alone."""
    key, _ = fleet.new_key(allowed_models=["gpt-4o"])
    async with fleet.http(key) as client, fleet.http() as anyone:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["gpt-4o"]
        assert (await client.get("/v1/models/gpt-4o")).json()["route"]["kind"] == "alias"
        assert (await client.get(f"/v1/models/{MODEL}")).status_code == 403
        everything = [one["id"] for one in (await anyone.get("/v1/models")).json()["data"]]
        assert everything == sorted(["gpt-4o", "even", MODEL, SPARE])
        for model, status in (("gpt-4o", 200), (MODEL, 403), ("even", 403)):
            answer = await client.post("/v1/chat/completions", json=chat_body(model=model))
            assert answer.status_code == status, model


async def test_a_conversation_stays_on_its_variant(fleet: GatewayFleet) -> None:
    """Each of its turns; others are spread."""
    used = set()
    async with fleet.http() as client:
        for idx in range(8):
            turns = [{"role": "user", "content": f"question {idx}"}]
            models = []
            for _ in range(2):
                body = chat_body(turns, model="even")
                answer = (await client.post("/v1/chat/completions", json=body)).json()
                models.append(answer["model"])
                turns += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
                turns[-2] = {"role": "assistant", "content": turns[-2]["content"]}
            assert len(set(models)) == 1
            used.add(models[0])
    assert used == {MODEL, SPARE}


async def test_the_next_model_steps_in_before_the_first_byte(fleet: GatewayFleet) -> None:
    """Silent, full, lost: one answer, one entry at the price of who made it, no lease left."""
    fleet.billing.set_price(Price(model=SPARE, input_nano_usd=7, output_nano_usd=11))
    switches = fleet.worker.switches
    async with fleet.http() as client:
        for failure in ("silent", "full", "lost"):
            switches.never_begin, switches.refuse = failure == "silent", failure == "full"
            if failure == "lost":
                await fleet.workers[0].kill()
            body = chat_body(failure, model="gpt-4o", stream=True)
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert f'"model":"{SPARE}"' in answer.text
            assert answer.headers["x-headrace-model"] == SPARE
            assert answer.headers["x-headrace-fallback"] == "2"
            story = (await client.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()
            failed = {one["model"]: one["reason"] for one in story["route"]["failed"]}
            assert list(failed) == [MODEL, "nobody-serves-this"]
            assert failed["nobody-serves-this"] == "MODEL_NOT_FOUND"
    await fleet.settled()
    for closed in fleet.usage.closed_events():
        assert (closed.model, closed.ending) == (SPARE, ENDING_COMPLETED)
        usage = closed.usage
        assert closed.amount_nano_usd == 7 * usage.prompt_tokens + 11 * usage.output_tokens
    assert [settle.actual.requests for settle in fleet.limiter.settles] == [0, 1] * 3


async def test_nobody_waits_for_a_lost_model_while_another_stands_ready(
    fleet: GatewayFleet,
) -> None:
    """Asked for by its own name it is waited for; by the route its spare answers at once."""
    fleet.router.set_reachable("w0", False)
    async with fleet.http() as client, asyncio.timeout(10):
        waiting = asyncio.create_task(client.post("/v1/chat/completions", json=chat_body()))
        answer = await client.post("/v1/chat/completions", json=chat_body(model="gpt-4o"))
        assert answer.headers["x-headrace-model"] == SPARE
        assert not waiting.done()
        fleet.router.set_reachable("w0", True)
        assert (await waiting).json()["model"] == MODEL


async def test_neither_a_wrong_request_nor_a_started_stream_falls_back(
    fleet: GatewayFleet,
) -> None:
    """The caller is told of the mistake; a stream that has begun ends with an error event."""
    fleet.worker.script = saying("a" * 50)
    async with fleet.http() as client:
        body = chat_body("x" * 5000, model="gpt-4o")
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        fleet.worker.switches.die_after_tokens = 3
        fleet.gateway._flow.generator.__dict__["max_attempts"] = 1
        answer = await client.post(
            "/v1/chat/completions", json=chat_body(model="gpt-4o", stream=True)
        )
        assert answer.headers["x-headrace-model"] == MODEL
        assert '"error"' in answer.text
    assert not fleet.workers[1].worker.requests


async def test_a_reload_drops_no_stream(fleet: GatewayFleet) -> None:
    """A stream keeps the model that it began with; the next request goes the new way."""
    path = fleet.folder / "routes.toml"
    admin, _ = fleet.new_key(scopes=["admin", "inference"])
    fleet.worker.switches.delay_per_token_s = 0.02
    fleet.worker.script = saying("twelve bytes")
    sdk = fleet.openai()
    stream = await sdk.chat.completions.create(**chat_body(model="gpt-4o", stream=True))
    text = (await anext(stream)).choices[0].delta.content or ""
    path.write_text(f'version = 1\nrevision = "second"\n[routes."gpt-4o"]\nmodel = "{SPARE}"')
    async with sdk, fleet.http(admin) as operator, fleet.http() as client:
        told = (await operator.post("/v1/admin/model-routes/reload")).json()
        # The look of each second may have been first.
        assert told.pop("outcome") in ("taken", "unchanged")
        assert told == {"revision": "second", "error": None, "routes": ["gpt-4o"]}
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        assert text == "twelve bytes"
        answer = await client.post("/v1/chat/completions", json=chat_body(model="gpt-4o"))
        assert answer.json()["model"] == SPARE
        path.write_text("version = 1\n[routes.x]\nmodels = 1")
        await eventually(lambda: bool(fleet.gateway.routes.standing.error))
        told = (await operator.get("/v1/admin/model-routes")).json()
        assert (told["outcome"], told["revision"]) == ("refused", "second")
        assert "routes.x" in told["error"]
        assert (await client.get("/v1/admin/model-routes")).status_code == 403
