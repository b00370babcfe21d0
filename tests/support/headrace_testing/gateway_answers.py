"""Questions to a `GatewayFleet` and what their answers say."""

from __future__ import annotations

import json
from typing import Any

import httpx

from headrace_testing.gateway_fleet import GatewayFleet, chat_body

CHAT = "/v1/chat/completions"


async def ask(fleet: GatewayFleet, key: str | None = None, **fields: Any) -> httpx.Response:
    """Post one chat request; fields as of `chat_body`."""
    async with fleet.http(key) as client:
        return await client.post(CHAT, json=chat_body(**fields))


def streamed_text(response: httpx.Response, choice_idx: int = 0) -> str:
    """Return the text of one choice of a stream."""
    text = ""
    for line in response.text.split("\n\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", []):
                if choice["index"] == choice_idx:
                    text += choice["delta"].get("content") or ""
    return text


def finish_reasons(response: httpx.Response) -> list[str]:
    """Return how the choices of a stream ended, in order."""
    return [
        choice["finish_reason"]
        for line in response.text.split("\n\n")
        if line.startswith("data: {")
        for choice in json.loads(line[6:]).get("choices", [])
        if choice["finish_reason"]
    ]


def degraded(fleet: GatewayFleet, service: str) -> float:
    """Return how often the gateway went on without a service."""
    value = fleet.gateway.registry.get_sample_value(
        "headrace_gateway_degraded_total", {"dependency": service}
    )
    return value or 0.0


def is_limiter_away(fleet: GatewayFleet) -> float | None:
    """Return the gauge."""
    return fleet.gateway.registry.get_sample_value("headrace_gateway_limiter_away")
