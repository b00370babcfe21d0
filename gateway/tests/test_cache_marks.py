"""Marks for a provider's cache, which agents leave in what they send to any server."""

from __future__ import annotations

from typing import Any

from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet

MARK = {"type": "ephemeral"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}


async def prompt_of(fleet: GatewayFleet, path: str, **body: Any) -> list[int]:
    """What the worker is given for a body."""
    async with fleet.http() as http:
        answer = await http.post(path, json={"model": MODEL, "max_tokens": 3, **body})
    assert answer.status_code == 200, answer.text
    return list(fleet.worker.requests[-1].prompt_token_ids)


async def test_a_chat_is_the_same_with_marks_and_without(fleet: GatewayFleet) -> None:
    """On parts and tools as for other providers, and CrewAI's own on messages."""
    path, text = "/v1/chat/completions", {"type": "text", "text": "hi"}
    tool: Any = {"type": "function", "function": FUNCTION}
    plain = [{"role": "user", "content": [text]}]
    marked: Any = [{"role": "user", "content": [{**text, "cache_control": MARK}]}]
    marked[0].update(cache_breakpoint=True, cache_control={**MARK, "ttl": "1h"})
    unmarked = await prompt_of(fleet, path, messages=plain, tools=[tool])
    tool["cache_control"] = MARK
    assert await prompt_of(fleet, path, messages=marked, tools=[tool]) == unmarked


async def test_a_message_is_the_same_with_a_wider_scope(fleet: GatewayFleet) -> None:
    """Claude Code asks for a cache beyond its own account."""
    text: Any = {"type": "text", "text": "hi"}
    unmarked = await prompt_of(
        fleet, "/v1/messages", messages=[{"role": "user", "content": [text]}]
    )
    text["cache_control"] = {**MARK, "ttl": "1h", "scope": "global"}
    marked = await prompt_of(fleet, "/v1/messages", messages=[{"role": "user", "content": [text]}])
    assert marked == unmarked
