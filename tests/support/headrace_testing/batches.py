"""Batches over HTTP, with the SDK that applications use: make them, wait for them."""

from __future__ import annotations

import json
from typing import Any, Final

import openai

from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually

URL: Final = "/v1/chat/completions"


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    """Return a chat request whose prompt is its id."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {**body, **fields}}


def jsonl(*lines: Any) -> bytes:
    """Return a file of lines; texts stand in it as they are."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    return "\n".join(texts).encode()


async def upload(client: openai.AsyncOpenAI, *lines: Any) -> str:
    """Upload a file of lines; return its id."""
    made = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return made.id


async def start(client: openai.AsyncOpenAI, *lines: Any) -> str:
    """Make a batch of lines; return its id."""
    file_id = await upload(client, *lines)
    made = await client.batches.create(
        input_file_id=file_id, endpoint=URL, completion_window="24h", metadata={"a": "b"}
    )
    assert made.status in ("validating", "in_progress")
    return made.id


async def ended(client: openai.AsyncOpenAI, batch_id: str, status: str = "completed") -> Any:
    """Wait for the end of a batch, which must be *status*."""

    async def is_over() -> Any:
        batch = await client.batches.retrieve(batch_id)
        assert batch.status == status, batch
        return batch

    return await eventually(is_over, within_s=20, every_s=0.1)


async def results(client: openai.AsyncOpenAI, file_id: str) -> list[dict[str, Any]]:
    """Return the lines of a file of results."""
    text = (await client.files.content(file_id)).text
    return [json.loads(one) for one in text.splitlines()]


def check_paid_once(fleet: GatewayFleet, good: list[dict[str, Any]]) -> None:
    """Each result stands in the books with its own tokens, and nothing else is closed."""
    closed = [(it.request_id, it.usage.output_tokens) for it in fleet.usage.closed_events()]
    told = [
        (it["response"]["request_id"], it["response"]["body"]["usage"]["completion_tokens"])
        for it in good
    ]
    assert sorted(closed) == sorted(told)
