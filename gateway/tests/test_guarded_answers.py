"""The guard's word counts at every door, and so does its absence."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from headrace_contracts.usage.v1 import usage_pb2
from headrace_testing.byte_tokenizer import END_OF_TEXT_ID
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_answers import CHAT, ask, degraded, finish_reasons, streamed_text
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.left_generators import left_generators
from headrace_testing.waiting import eventually


async def test_every_part_of_the_input_is_looked_at(fleet: GatewayFleet) -> None:
    """A blocked word is found wherever it stands, and no worker sees the request."""
    fleet.guard.blocklist = ["heron"]
    text: str = "a heron here"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {**call, "function": {"name": "f", "arguments": json.dumps({"q": text})}}
    user = {"role": "user", "content": "hi"}
    conversations: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": text}],
        [{"role": "system", "content": text}, user],
        [{"role": "user", "content": text}, user],
        [user, {"role": "assistant", "content": text}, user],
        [
            user,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": text},
        ],
        [user, {"role": "user", "content": [{"type": "text", "text": text}]}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "her"}, {"type": "text", "text": "on"}],
            }
        ],
        [{"role": "user", "name": "heron", "content": "hi"}],
        [user, {"role": "assistant", "tool_calls": [said]}, user],
    ]
    for messages in conversations:
        for streaming in (False, True):
            answer = await ask(fleet, content=messages, stream=streaming)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "content_filter"
            assert "heron" not in answer.text
    assert fleet.worker.requests == []
    await fleet.settled()
    assert fleet.usage.events == []


async def test_tools_and_schemas_are_looked_at(fleet: GatewayFleet) -> None:
    """A blocked word in a tool's description or in a schema is no way around the guard."""
    fleet.guard.blocklist = ["heron"]
    tool = {"name": "f", "description": "a heron", "parameters": {"type": "object"}}
    schema = {"name": "s", "schema": {"properties": {"heron": {}}}}
    for fields in (
        {"tools": [{"type": "function", "function": tool}]},
        {"response_format": {"type": "json_schema", "json_schema": schema}},
    ):
        answer = await ask(fleet, **fields)
        assert answer.json()["error"]["code"] == "content_filter"
    harmless = await ask(fleet, tools=[{"type": "function", "function": {"name": "f"}}])
    assert harmless.status_code == 200


async def test_prompt_of_ids_is_read_as_text(fleet: GatewayFleet) -> None:
    """Token ids are no way around the guard."""
    fleet.guard.blocklist = ["heron"]
    async with fleet.http() as client:
        answer = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": list(b"a heron")}
        )
    assert answer.json()["error"]["code"] == "content_filter"


async def test_blocklist_of_the_key_counts(fleet: GatewayFleet) -> None:
    """The key's own words travel with each call, input and output."""
    fleet.worker.script = saying("a bittern")
    key, _ = fleet.new_key(guard_blocklist=["bittern"])
    blocked = await ask(fleet, key, content="bittern")
    answer = await ask(fleet, key)
    assert blocked.status_code == 400
    assert answer.json()["choices"][0]["finish_reason"] == "content_filter"
    assert answer.json()["choices"][0]["message"]["content"] == "a "


async def test_redacted_input_is_what_the_worker_gets(fleet: GatewayFleet) -> None:
    """The guard's text replaces the client's before tokenising."""
    fleet.guard.blocklist, fleet.guard.redacts = ["4111"], True
    await ask(fleet, content="card 4111")
    prompt = bytes(i for i in fleet.worker.requests[0].prompt_token_ids if i < END_OF_TEXT_ID)
    assert b"card [redacted blocklist]" in prompt
    assert b"4111" not in prompt


@pytest.mark.parametrize("streaming", [True, False])
async def test_blocked_output_never_goes_out(fleet: GatewayFleet, streaming: bool) -> None:
    """Text up to the word is sent, the word never, not even in log probabilities."""
    fleet.guard.blocklist = ["heron"]
    # Much more: the worker is told to stop while it is still at it, on any machine.
    fleet.worker.script = saying("I see a heron now" + ", and more" * 50)
    fleet.worker.switches.delay_per_token_s = 0.005
    answer = await ask(fleet, stream=streaming, logprobs=True, top_logprobs=0)
    if streaming:
        assert streamed_text(answer) == "I see a "
        assert finish_reasons(answer) == ["content_filter"]
        assert answer.text.endswith("data: [DONE]\n\n")
        chunks = [json.loads(x[6:]) for x in answer.text.split("\n\n") if x[:7] == "data: {"]
        tokens = [
            entry["token"]
            for chunk in chunks
            for choice in chunk["choices"]
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
    else:
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == "I see a "
        assert choice["finish_reason"] == "content_filter"
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens) in "I see a "
    await eventually(lambda: fleet.worker.cancelled)
    await fleet.settled()
    assert fleet.usage.closed_events()[0].ending == usage_pb2.ENDING_OUTPUT_BLOCKED


async def test_one_blocked_choice_does_not_end_the_others(fleet: GatewayFleet) -> None:
    """Every choice is judged by itself."""
    fleet.guard.blocklist = ["heron"]
    fleet.worker.script = lambda _p, _s, idx: b"a heron" if idx == 1 else b"a duck"
    choices = (await ask(fleet, n=3)).json()["choices"]
    assert [it["finish_reason"] for it in choices] == ["stop", "content_filter", "stop"]
    assert [it["message"]["content"] for it in choices] == ["a duck", "a ", "a duck"]


@pytest.mark.parametrize("streaming", [True, False])
async def test_guard_down_closes_closed_keys_and_opens_open_ones(
    fleet: GatewayFleet, streaming: bool
) -> None:
    """Fail closed: 503, nothing reaches a worker. Fail open: served and counted."""
    fleet.worker.script = saying("hello")
    key, _ = fleet.new_key(guard_fail_open=True)
    await fleet.guard_server.kill()
    refused = await ask(fleet, stream=streaming)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "guard_unavailable"
    assert fleet.worker.requests == []
    served = await ask(fleet, key, stream=streaming)
    assert served.status_code == 200
    assert "hello" in (streamed_text(served) if streaming else served.text)
    assert degraded(fleet, "guard") >= 3
    await fleet.settled()


async def test_a_guard_that_starts_again_is_waited_for(fleet: GatewayFleet) -> None:
    """As long as a verdict may take: asked while nobody listens, and cut off while it judged."""
    fleet.worker.script = saying("hello")
    fleet.guard.switches.hang = True
    cut = asyncio.create_task(ask(fleet, stream=True))
    await eventually(lambda: fleet.guard.inputs)
    await fleet.guard_server.kill()
    fleet.guard.switches.hang = False
    late = asyncio.create_task(ask(fleet))
    done, _ = await asyncio.wait({cut, late}, timeout=0.5)
    assert not done
    await fleet.guard_server.start()
    assert [(await it).status_code for it in (cut, late)] == [200, 200]
    assert degraded(fleet, "guard") == 0
    await fleet.settled()


@pytest.mark.parametrize("fails_open", [False, True])
async def test_a_guard_that_cannot_judge_is_not_counted_as_away(
    fleet: GatewayFleet, fails_open: bool
) -> None:
    """A client can bring that about, by a part that nothing reads; it must wake nobody."""
    fleet.worker.script = saying("hello")
    key, _ = fleet.new_key(guard_fail_open=fails_open)
    fleet.guard.switches.cannot_look = True
    answer = await ask(fleet, key, stream=True)
    assert answer.status_code == (200 if fails_open else 503)
    assert degraded(fleet, "guard") == 0
    await fleet.settled()


async def test_guard_lost_in_mid_stream(fleet: GatewayFleet) -> None:
    """Closed: the stream ends with an error event. Open: it goes on whole."""
    fleet.worker.script = saying("the heron is late")
    fleet.worker.switches.hang_after_tokens = 4
    open_key, _ = fleet.new_key(guard_fail_open=True)

    async def read(key: str) -> str:
        text, go_on = "", fleet.worker.switches.go_on
        fleet.guard.switches.refuse = False
        go_on.clear()
        body = chat_body(stream=True)
        async with fleet.http(key) as client, client.stream("POST", CHAT, json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if streamed_text(httpx.Response(200, text=text.rpartition("\n\n")[0])):
                    # Some of it is out, the rest is not made yet.
                    fleet.guard.switches.refuse = True
                    go_on.set()
        return text

    closed = httpx.Response(200, text=await read(fleet.api_key))
    opened = httpx.Response(200, text=await read(open_key))
    assert "the ".startswith(streamed_text(closed))
    assert "guard_unavailable" in closed.text
    fleet.guard.switches.refuse = False
    reports = await eventually(lambda: len(fleet.guard.reports) >= 2 and fleet.guard.reports)
    assert sorted((it.fail_open, it.guard_lost) for it in reports) == [
        (False, True),
        (True, True),
    ]
    assert finish_reasons(closed) == []
    assert streamed_text(opened) == "the heron is late"
    assert finish_reasons(opened) == ["stop"]
    await fleet.settled()


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_no_task_is_left_to_close_what_read_the_guard(
    fleet: GatewayFleet, fields: dict[str, object]
) -> None:
    """An answer ends with the guard's last word, and nothing runs behind it for that."""
    fleet.worker.script = saying("Hello")
    async with fleet.http() as client:
        with left_generators() as left:
            await client.post("/v1/chat/completions", json=chat_body(**fields))
            # Such a task would be made in the loop's next turn.
            await asyncio.sleep(0.05)
    assert not [it for it in left if "headrace_gateway" in it]


@pytest.mark.parametrize("streaming", [True, False])
async def test_what_the_guard_cannot_judge_is_no_failure_of_the_workers(
    fleet_of_two: GatewayFleet, streaming: bool
) -> None:
    """It is told as the guard's, no other replica makes it again, and the router hears of none."""
    fleet = fleet_of_two
    for server in fleet.workers:
        server.worker.script = saying("long " * 400)
        server.worker.switches.hang_after_tokens = 1200
    answering = asyncio.create_task(ask(fleet, stream=streaming, max_tokens=2000))
    running = await eventually(
        lambda: [it.worker for it in fleet.workers if it.worker.running], within_s=5
    )
    await asyncio.sleep(0.2)
    fleet.guard.switches.cannot_look = True
    running[0].switches.go_on.set()
    async with asyncio.timeout(30):
        answer = await answering
    assert "guard_unavailable" in answer.text
    assert answer.status_code == (200 if streaming else 503)
    await fleet.settled()
    assert sum(len(it.worker.requests) for it in fleet.workers) == 1
    told = [it for each in fleet.router.progress.values() for it in each]
    assert [it.failed_reason for it in told if it.failed_reason] == []
