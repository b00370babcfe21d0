"""/v1/messages over HTTP, with Anthropic's own SDK."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.usage.v1 import usage_pb2
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually

SAY: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


async def test_a_whole_message(fleet: GatewayFleet) -> None:
    """Content, ending and usage; cached input is counted apart."""
    fleet.worker.script = saying("Hello, 水車!")
    async with fleet.anthropic() as client:
        for _ in range(2):
            answer = await client.messages.create(
                model=MODEL, max_tokens=99, system="Be brief. " * 9, messages=SAY
            )
    (block,) = answer.content
    assert (block.type, block.text) == ("text", "Hello, 水車!")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.id.startswith("msg_")
    assert answer.usage.output_tokens == len("Hello, 水車!".encode()) + 1
    assert answer.usage.cache_read_input_tokens
    closed = fleet.usage.closed_events()[-1]
    assert (
        answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        == closed.usage.prompt_tokens
    )
    assert (closed.endpoint, closed.ending) == ("messages", usage_pb2.ENDING_COMPLETED)
    await fleet.settled()


async def test_the_events_of_a_stream_in_order(fleet: GatewayFleet) -> None:
    """message_start, one block, message_delta, message_stop; the SDK puts the message together."""
    fleet.worker.script = saying("Hi there")
    async with (
        fleet.anthropic() as client,
        client.messages.stream(model=MODEL, max_tokens=99, messages=SAY) as stream,
    ):
        kinds = [event.type async for event in stream if event.type != "text"]
        message = await stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) <= {"ping", "content_block_delta"}
    assert [block.text for block in message.content if block.type == "text"] == ["Hi there"]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len("Hi there") + 1
    assert message.usage.input_tokens > 0


async def test_raw_events_carry_their_names(fleet: GatewayFleet) -> None:
    """Each event has an `event:` line equal to its type; a ping follows the first block's start."""
    fleet.worker.script = saying("ok")
    async with fleet.http("") as client:
        response = await client.post(
            "/v1/messages",
            json={"model": MODEL, "max_tokens": 9, "messages": SAY, "stream": True},
            headers={"x-api-key": fleet.api_key, "anthropic-version": "2023-06-01"},
        )
    names = [
        line.removeprefix("event: ") for line in response.text.splitlines() if "event: " in line
    ]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-1] == "message_stop"
    assert "[DONE]" not in response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert "x-headrace-replica" in response.headers


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_tool_is_called_and_its_result_is_read(
    fleet: GatewayFleet, is_stream: bool
) -> None:
    """tool_use comes as a block of its own; tool_result goes back to the model."""
    fleet.worker.script = saying("Let me see. " + CALL)
    ask: Any = {"model": MODEL, "max_tokens": 200, "messages": SAY, "tools": [TOOL]}
    async with fleet.anthropic() as client:
        if is_stream:
            async with client.messages.stream(**ask) as stream:
                answer: Any = await stream.get_final_message()
        else:
            answer = await client.messages.create(**ask)
        text, call = answer.content
        assert text.text.strip() == "Let me see."
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Bern"})
        assert call.id.startswith("toolu_")
        assert answer.stop_reason == "tool_use"
        fleet.worker.script = saying("Sunny.")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun", "is_error": True}
        again = await client.messages.create(
            model=MODEL,
            max_tokens=50,
            tools=[TOOL],
            messages=[
                *SAY,
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
            ],
        )
    assert again.content[0].text == "Sunny."
    seen = bytes(i for i in fleet.worker.requests[-1].prompt_token_ids if i < 256).decode()
    assert "Error: sun" in seen
    assert seen.index("Error: sun") < seen.index("And now?")


async def test_a_stop_sequence_is_named(fleet: GatewayFleet) -> None:
    """stop_reason says that a stop sequence ended it, and which."""
    fleet.worker.script = saying("one END two")
    async with fleet.anthropic() as client:
        answer = await client.messages.create(
            model=MODEL, max_tokens=99, messages=SAY, stop_sequences=["END"]
        )
        short = await client.messages.create(model=MODEL, max_tokens=1, messages=SAY)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert short.stop_reason == "max_tokens"


async def test_count_tokens_equals_the_prompt_of_an_answer(fleet: GatewayFleet) -> None:
    """Counting costs nothing and is exact."""
    ask: Any = {"model": MODEL, "messages": SAY, "system": [{"type": "text", "text": "Be kind."}]}
    async with fleet.anthropic() as client:
        counted = await client.messages.count_tokens(**ask)
        assert fleet.usage.events == []
        answer = await client.messages.create(max_tokens=1, **ask)
    assert counted.input_tokens == answer.usage.input_tokens


async def test_the_tool_runner_runs_without_a_thread(fleet: GatewayFleet) -> None:
    """It asks for a conversation held by the server first, and goes on by itself without."""

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Tell the weather."""
        fleet.worker.script = saying("Take a coat.")
        return f"Rain in {city}."

    call = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    fleet.worker.script = saying(f"<tool_call>\n{call}\n</tool_call>")
    async with fleet.anthropic() as client:
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=200, messages=SAY, tools=[weather]
        )
        last = await runner.until_done()
    assert (last.content[0].text, last.stop_reason) == ("Take a coat.", "end_turn")
    seen = bytes(i for i in fleet.worker.requests[-1].prompt_token_ids if i < 256).decode()
    assert "Rain in Bonn." in seen


async def test_as_many_stop_sequences_as_workers_take(fleet: GatewayFleet) -> None:
    """Anthropic documents no bound."""
    async with fleet.anthropic() as client:
        answer = await client.messages.create(
            model=MODEL, max_tokens=99, messages=SAY, stop_sequences=[f"{n};" for n in range(64)]
        )
        assert answer.stop_reason == "end_turn"
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
            await client.messages.create(
                model=MODEL, max_tokens=9, messages=SAY, stop_sequences=["x"] * 65
            )


async def test_count_tokens_of_what_fits_no_context(fleet: GatewayFleet) -> None:
    """How long it is can be asked to shorten it."""
    long = [{"role": "user", "content": "x" * 5000}]
    async with fleet.anthropic() as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=long)
        with pytest.raises(anthropic.BadRequestError, match=str(counted.input_tokens)):
            await client.messages.create(model=MODEL, max_tokens=1, messages=long)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"messages": [*SAY, {"role": "assistant", "content": "Well,"}]}, "messages[1].role"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"extra_body": {"mcp_servers": [{"url": "http://x"}]}}, "mcp_servers"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"extra_body": {"system": [{"text": "Be kind."}]}}, "system[0].type"),
        ({"stop_sequences": ["", "a"]}, "stop_sequences"),
        ({"extra_headers": {"anthropic-version": "1999-01-01"}}, "anthropic-version"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 8}]}, "tools[0].type"),
        ({"tools": [{"name": "w", "input_schema": {}, "max_uses": 8}]}, "tools[0].max_uses"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": "http://x"}}
                        ],
                    }
                ]
            },
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}],
                    }
                ]
            },
            "messages[0].content[0].tool_use_id",
        ),
    ],
)
async def test_mistakes_are_named_in_anthropics_shape(
    fleet: GatewayFleet, fields: Any, word: str
) -> None:
    """400 with type, a message that names the field, and the request id."""
    async with fleet.anthropic() as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(
                **{"model": MODEL, "max_tokens": 9, "messages": SAY, **fields}
            )
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert word in body["error"]["message"]
    assert caught.value.request_id == body["request_id"]


async def test_other_refusals_have_their_own_types(fleet: GatewayFleet) -> None:
    """Unknown key and unknown model raise the SDK's own errors."""
    ask: Any = {"model": MODEL, "max_tokens": 9, "messages": SAY}
    async with fleet.anthropic("sk-hr-wrong") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**ask)
    async with fleet.anthropic() as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(**{**ask, "model": "nope"})
        assert caught.value.type == "not_found_error"


async def test_the_guard_sees_every_part(fleet: GatewayFleet) -> None:
    """The guard sees system and messages under the client's names."""
    async with fleet.anthropic() as client:
        await client.messages.create(model=MODEL, max_tokens=9, system="Be kind.", messages=SAY)
    paths = {part.path: part.trust for part in fleet.guard.inputs[-1].parts}
    assert paths == {
        "system": guard_pb2.TRUST_OWNER,
        "messages[0].content": guard_pb2.TRUST_USER,
    }


async def test_a_client_that_leaves_stops_the_work(fleet: GatewayFleet) -> None:
    """The worker is cancelled and what was made is billed."""
    fleet.worker.switches.delay_per_token_s = 0.05
    async with (
        fleet.anthropic() as client,
        client.messages.stream(model=MODEL, max_tokens=200, messages=SAY) as stream,
    ):
        async for event in stream:
            if event.type == "text":
                break
    await eventually(lambda: fleet.worker.cancelled)
    await fleet.settled()
    (closed,) = fleet.usage.closed_events()
    assert closed.ending == usage_pb2.ENDING_CLIENT_GONE


async def test_an_error_in_the_middle_is_an_event(fleet_parts: GatewayFleet) -> None:
    """A deadline after the first byte: an error event ends the stream, no message_stop."""
    fleet_parts.settings["request_timeout_s"] = 1.0
    await fleet_parts.start()
    fleet_parts.worker.switches.hang_after_tokens = 3
    async with fleet_parts.http() as client:
        body = {"model": MODEL, "max_tokens": 50, "messages": SAY, "stream": True}
        text = (await client.post("/v1/messages", json=body)).text
    await fleet_parts.close()
    assert "content_block_delta" in text
    assert "event: error" in text
    assert '"type":"error"' in text
    assert "message_stop" not in text
