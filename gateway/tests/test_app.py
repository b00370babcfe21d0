"""The whole gateway over HTTP, with the SDK that applications use."""

from __future__ import annotations

import asyncio

import openai
import pytest
from headrace_contracts.usage.v1 import usage_pb2
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually

SAY = [{"role": "user", "content": "hi"}]


async def test_whole_chat_answer(fleet: GatewayFleet) -> None:
    """The SDK reads a whole answer with usage, zero cached tokens said."""
    fleet.worker.script = saying("Hello, 水車!")
    async with fleet.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=SAY)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello, 水車!", "stop")
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<user\nhi>\n<assistant\n") + 0
    assert answer.usage.completion_tokens == len("Hello, 水車!".encode()) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
