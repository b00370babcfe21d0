"""What a request names stands; what it leaves open is the model's, whichever API it comes by."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from headrace_common.errors import HeadraceError
from headrace_contracts.worker.v1.worker_pb2 import ModelCard, Sampling, SamplingValues
from headrace_gateway.sampling_defaults import NamedSampling, SamplingDefaults
from headrace_testing.fake_text_worker import FakeTextWorker
from headrace_testing.fake_worker import MODEL, FakeWorker
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually

SPARE, TEXT = "spare-model", "text-model"
CARD = SamplingValues(temperature=0.2, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1)
DEFAULTS = {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
OPENAIS = {"temperature": 1.0, "top_p": 1.0}
ROUTES = f"""
version = 1
[routes.safe]
model = "{MODEL}"
fallbacks = ["{SPARE}"]
[routes.same]
model = "{MODEL}"
"""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(max_tokens=4),
    "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 4},
    "/v1/messages": chat_body(max_tokens=4),
}


@pytest.fixture
async def fleet(fleet_parts: GatewayFleet) -> AsyncIterator[GatewayFleet]:
    """A model with defaults on two workers, another without, and an engine of another make."""
    path = fleet_parts.folder / "routes.toml"
    path.write_text(ROUTES)
    fleet_parts.settings["model_routes_file"] = path
    for idx in range(2):
        await fleet_parts.add_worker(FakeWorker(f"w{idx}", sampling_defaults=CARD))
    await fleet_parts.add_worker(FakeWorker("spare", model=SPARE))
    await fleet_parts.add_worker(FakeTextWorker("text", model=TEXT))
    await fleet_parts.start(0)
    await eventually(lambda: all(is_served(fleet_parts, it) for it in (MODEL, SPARE, TEXT)))
    yield fleet_parts
    await fleet_parts.close()


def is_served(fleet: GatewayFleet, model: str) -> bool:
    try:
        fleet.gateway.directory.get(model)
    except HeadraceError:
        return False
    return True


def used(fleet: GatewayFleet, model: str = MODEL) -> list[dict[str, Any]]:  # Any: approximations
    """Return what each request to a model's workers was to be sampled with."""
    asked = [it for server in fleet.workers for it in server.worker.requests if it.model == model]
    return [
        {name: pytest.approx(getattr(it.sampling, name), rel=1e-6) for name in DEFAULTS}
        for it in asked
    ]


async def ask(client: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    answer = await client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_leaves_to_the_model_what_it_does_not_name(
    fleet: GatewayFleet, path: str
) -> None:
    """And what is named stands, zero and OpenAI's own default too."""
    async with fleet.http() as client:
        await ask(client, path)
        await ask(client, path, temperature=1)
        await ask(client, path, temperature=0, top_p=1)
    first, second, third = used(fleet)
    assert first == DEFAULTS
    assert second == {**DEFAULTS, "temperature": 1}
    assert third == {**DEFAULTS, "temperature": 0, "top_p": 1}


@pytest.mark.parametrize(
    ("named", "stands"),
    [
        ({"top_k": -1, "min_p": 0, "repetition_penalty": 1},
         {"top_k": 0, "min_p": 0, "repetition_penalty": 1}),
        ({"top_k": 0, "top_p": 0}, {"top_k": 0, "top_p": 1e-6}),
        ({"temperature": None, "top_p": None}, {}),
        ({"n": 3, "seed": 5, "logprobs": True}, {}),
    ],
)  # fmt: skip
async def test_a_value_that_switches_off_is_a_value(
    fleet: GatewayFleet, named: dict[str, Any], stands: dict[str, float]
) -> None:
    """Off is not the same as not said; null is."""
    async with fleet.http() as client:
        await ask(client, "/v1/chat/completions", **named)
    assert used(fleet) == [{**DEFAULTS, **stands}]


async def test_lines_of_a_batch_too(fleet: GatewayFleet) -> None:
    """Each line is a request of its own."""
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name, body in (
            ("a", chat_body(max_tokens=2)),
            ("b", chat_body(max_tokens=2, temperature=1.5)),
        )
    ]
    content = "\n".join(json.dumps(one) for one in lines).encode()
    async with fleet.openai() as client:
        made = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        async def is_over() -> Any:
            return (await client.batches.retrieve(batch.id)).status == "completed"

        await eventually(is_over, within_s=20, every_s=0.1)
    temperatures = sorted(
        it.sampling.temperature for server in fleet.workers for it in server.worker.requests
    )
    assert temperatures == pytest.approx([0.2, 1.5])


async def test_a_model_that_steps_in_has_its_own(fleet: GatewayFleet) -> None:
    """The defaults are those of the model that is really asked."""
    for server in fleet.workers[:2]:
        server.worker.switches.refuse = True
    async with fleet.http() as client:
        answer = await ask(client, "/v1/chat/completions", model="safe", top_p=0.5)
        told = await ask(client, "/v1/responses", model="safe")
    assert answer["model"] == SPARE
    off = {"top_k": 0, "min_p": 0, "repetition_penalty": 0}
    assert used(fleet, SPARE) == [{**OPENAIS, **off, "top_p": 0.5}, {**OPENAIS, **off}]
    assert (told["temperature"], told["top_p"]) == (1, 1)


async def test_a_stream_goes_on_with_what_it_began_with(fleet: GatewayFleet) -> None:
    """Another worker gets the same values and the same seed."""
    for server in fleet.workers[:2]:
        server.worker.switches.die_after_tokens = 5
    async with fleet.http() as client:
        body = chat_body(max_tokens=8)
        answer = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await eventually(lambda: len(used(fleet)) == 2)
        assert (await answer).status_code == 200
    asked = [it for server in fleet.workers for it in server.worker.requests]
    assert sorted(len(it.resume) for it in asked) == [0, 1]
    assert used(fleet) == [DEFAULTS, DEFAULTS]
    assert asked[0].seed == asked[1].seed


async def test_responses_tell_what_was_used(fleet: GatewayFleet) -> None:
    """The model's value where none was named, also while it is queued; null = the engine's own."""
    async with fleet.http() as client:
        answers = [
            await ask(client, "/v1/responses"),
            await ask(client, "/v1/responses", temperature=0.7),
            await ask(client, "/v1/responses", background=True),
            await ask(client, "/v1/responses", model=TEXT, top_p=1),
        ]
    told = [(it["temperature"], it["top_p"]) for it in answers]
    assert told == [(0.2, 0.9), (0.7, 0.9), (0.2, 0.9), (None, 1)]
    assert answers[2]["status"] == "queued"
    await fleet.settled()


async def test_models_show_their_defaults(fleet: GatewayFleet) -> None:
    """A route shows them where all of its models have the same; SDKs pass them over."""
    async with fleet.http() as client:
        listed = (await client.get("/v1/models")).json()["data"]
        one = (await client.get(f"/v1/models/{MODEL}")).json()
    shown = {it["id"]: it["default_parameters"] for it in listed}
    assert shown == {MODEL: DEFAULTS, SPARE: OPENAIS, TEXT: None, "same": DEFAULTS, "safe": None}
    assert one["default_parameters"] == DEFAULTS
    async with fleet.openai() as sdk:
        assert (await sdk.models.retrieve(MODEL)).id == MODEL


async def test_an_engine_of_another_make_is_told_what_was_named(fleet: GatewayFleet) -> None:
    """It can leave the rest to the engine."""
    async with fleet.http() as client:
        await ask(client, "/v1/chat/completions", model=TEXT)
        await ask(client, "/v1/completions", model=TEXT, temperature=0, top_k=-1, top_p=1)
    first, second = fleet.workers[3].worker.requests
    assert first.text.HasField("named_sampling")
    assert first.text.named_sampling == SamplingValues()
    assert second.text.named_sampling == SamplingValues(temperature=0, top_k=0, top_p=1)
    # For adapters that do not know the field.
    assert first.sampling.temperature == 1


def test_a_card_that_says_nothing_fills_nothing() -> None:
    """Then OpenAI's defaults stand as they were parsed."""
    sampling = Sampling(temperature=1, top_p=1)
    SamplingDefaults(ModelCard()).fill(sampling, NamedSampling())
    assert sampling == Sampling(temperature=1, top_p=1)


def test_what_is_shown_is_what_is_used() -> None:
    """A client that names the values it was shown gets the very same draw."""
    defaults = SamplingDefaults(ModelCard(sampling_defaults=SamplingValues(temperature=1 / 3)))
    filled = Sampling(temperature=1, top_p=1)
    defaults.fill(filled, NamedSampling())
    assert defaults.shown is not None
    assert filled == Sampling(temperature=defaults.shown["temperature"], top_p=1)
    assert defaults.shown == {"temperature": 0.333333, "top_p": 1.0}
