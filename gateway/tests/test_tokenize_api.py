"""/tokenize, /detokenize and /v1/models/{id} over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_testing.byte_tokenizer import IM_START_ID
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet, chat_body


async def ask(fleet: GatewayFleet, path: str, **body: Any) -> tuple[int, Any]:
    async with fleet.http() as client:
        response = await client.post(path, json={"model": MODEL, **body})
    return response.status_code, response.json()


async def test_a_prompt_and_back(fleet: GatewayFleet) -> None:
    """Ids, their number and the context; the ids give the text again; nothing is billed."""
    status, said = await ask(fleet, "/tokenize", prompt="hé", return_token_strs=True)
    assert status == 200
    assert said["tokens"] == list("hé".encode())
    assert (said["count"], said["max_model_len"]) == (3, fleet.worker.context_tokens)
    assert len(said["token_strs"]) == 3
    assert await ask(fleet, "/detokenize", tokens=said["tokens"]) == (200, {"prompt": "hé"})
    assert fleet.usage.events == []


async def test_messages_count_as_a_chat_counts_them(fleet: GatewayFleet) -> None:
    """Template, tools and all; longer than the context is counted too."""
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    _, said = await ask(fleet, "/tokenize", messages=messages, tools=tools)
    assert said["tokens"][0] == IM_START_ID
    async with fleet.http() as client:
        chat = await client.post("/v1/chat/completions", json=chat_body(messages, tools=tools))
    assert chat.json()["usage"]["prompt_tokens"] == said["count"]
    _, said = await ask(fleet, "/tokenize", prompt="x" * 100_000)
    assert said["count"] == 100_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "zap": 1}, "zap"),
        ("/tokenize", {"model": "none", "prompt": "a"}, "model"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_mistakes_are_named(fleet: GatewayFleet, path: str, body: Any, param: str) -> None:
    """In the public error shape."""
    status, said = await ask(fleet, path, **body)
    assert status in (400, 404)
    assert said["error"]["param"] == param


async def test_one_model_by_its_id(fleet: GatewayFleet) -> None:
    """As the SDK retrieves it; an unknown one is a 404 with the code that SDKs know."""
    async with fleet.openai() as client:
        model = await client.models.retrieve(MODEL)
    assert (model.id, model.object) == (MODEL, "model")
    async with fleet.http() as client:
        missing = await client.get("/v1/models/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
