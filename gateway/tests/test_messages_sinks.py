"""The shapes of /v1/messages, without a gateway around them."""

from __future__ import annotations

import json
from typing import Any

from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_gateway.captured_exchange import CapturedExchange
from headrace_gateway.messages_api.sinks import StreamedMessage, WholeMessage
from headrace_testing.clock import FakeClock

USAGE = TokenUsage(prompt_tokens=9, cached_gpu_tokens=4, output_tokens=7)


def _events(exchange: CapturedExchange) -> list[dict[str, Any]]:
    lines = exchange.body.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def _call(sink: WholeMessage | StreamedMessage) -> None:
    sink.add_text(0, "Let me see. ", None)
    sink.add_call(0, 0, "get_weather")
    sink.add_arguments(0, 0, '{"city":')
    sink.add_arguments(0, 0, ' "Bern"}')
    sink.add_call(0, 1, "get_time")
    sink.add_finish(0, "tool_calls")


async def test_calls_are_blocks_of_their_own() -> None:
    """Text, then each call with its input as JSON values."""
    exchange = CapturedExchange()
    sink = WholeMessage(exchange, "msg_1", "m")
    await sink.begin(1)
    _call(sink)
    await sink.end(USAGE)
    message = json.loads(exchange.body)
    text, weather, time = message["content"]
    assert text == {"type": "text", "text": "Let me see. ", "citations": []}
    assert (weather["type"], weather["name"]) == ("tool_use", "get_weather")
    assert weather["input"] == {"city": "Bern"}
    assert time["input"] == {}
    assert weather["id"] != time["id"]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["input_tokens"] == 5
    assert message["usage"]["cache_read_input_tokens"] == 4


async def test_a_stream_says_the_same_as_the_whole(clock: FakeClock) -> None:
    """Blocks put together from events equal the whole message's."""
    whole, streamed = CapturedExchange(), CapturedExchange()
    sink = WholeMessage(whole, "msg_1", "m")
    _call(sink)
    await sink.end(USAGE)
    stream = StreamedMessage(streamed, "msg_1", "m", lambda: USAGE, clock)
    await stream.begin(1)
    _call(stream)
    await stream.flush()
    await stream.end(USAGE)
    blocks: list[Any] = []
    inputs: dict[int, str] = {}
    for event in _events(streamed):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta" and "text" in event["delta"]:
            blocks[event["index"]]["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta":
            at = event["index"]
            inputs[at] = inputs.get(at, "") + event["delta"]["partial_json"]
    for at, text in inputs.items():
        blocks[at]["input"] = json.loads(text)
    assert blocks == json.loads(whole.body)["content"]
    assert streamed.is_over


async def test_arguments_that_were_cut_off_are_shown() -> None:
    """max_tokens in the middle of a call: the input is what there was."""
    exchange = CapturedExchange()
    sink = WholeMessage(exchange, "msg_1", "m")
    sink.add_call(0, 0, "f")
    sink.add_arguments(0, 0, '{"a": "b')
    sink.add_finish(0, "length")
    await sink.end(USAGE)
    message = json.loads(exchange.body)
    assert message["content"][0]["input"] == {"_incomplete": '{"a": "b'}
    assert message["stop_reason"] == "max_tokens"


async def test_a_blocked_answer_is_a_refusal() -> None:
    """The guard's end has a reason of its own."""
    exchange = CapturedExchange()
    sink = WholeMessage(exchange, "msg_1", "m")
    sink.add_finish(0, "content_filter")
    await sink.end(USAGE)
    assert json.loads(exchange.body)["stop_reason"] == "refusal"
