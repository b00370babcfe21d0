"""One fleet as the engine of another; gateways, adapters and router are real, in one process.

::

    client -> outer gateway -> router -> adapter (two of them) -> inner gateway -> fake worker
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_contracts.billing.v1.billing_pb2 import Price
from headrace_contracts.usage.v1.usage_pb2 import ENDING_CLIENT_GONE, ENDING_COMPLETED
from headrace_router.app import RouterApp
from headrace_router.settings import RouterSettings
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually, free_port
from headrace_worker.settings import UpstreamSettings
from headrace_worker.upstream.app import UpstreamApp

NAME = "big-model"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class TwoFleets:
    """The outer one is asked, the inner one answers."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.inner, self.outer = GatewayFleet(folder / "inner"), GatewayFleet(folder / "outer")
        self.adapters: list[UpstreamApp] = []
        self._stack = stack

    async def start(self) -> None:
        self.inner.settings["max_attempts"] = 1
        for fleet in (self.inner, self.outer):
            fleet.folder.mkdir()
        self._stack.push_async_callback(self.inner.close)
        await self.inner.start()
        for idx in range(2):
            await self._start_adapter(f"up-{idx}")
        addresses = ",".join(app.address for app in self.adapters)
        nowhere = f"redis://127.0.0.1:{free_port()}/0"
        settings = RouterSettings.model_validate({"redis_url": nowhere, "workers": addresses})
        router = RouterApp(settings, SystemClock())
        await router.start()
        self._stack.push_async_callback(router.stop, 0)
        await eventually(lambda: len(router.table.serving(NAME)) == 2, within_s=5)
        self.outer.settings["router_address"] = f"127.0.0.1:{router.rpc.port}"
        self._stack.push_async_callback(self.outer.close)
        await self.outer.start(num_workers=0)

    async def _start_adapter(self, name: str) -> None:
        settings = UpstreamSettings(
            worker_id=name,
            url=f"{self.inner.base_url}/v1",
            model=MODEL,
            model_name=NAME,
            api_key=self.inner.api_key,
            continuous_usage=True,
            drain_grace_s=0.1,
            probe_interval_s=0.1,
        )
        app = UpstreamApp(settings, SystemClock(), CollectorRegistry())
        await app.start()
        self._stack.push_async_callback(app.stop)
        self.adapters.append(app)


@pytest.fixture
async def fleets(tmp_path: Path) -> AsyncIterator[TwoFleets]:
    async with AsyncExitStack() as stack:
        made = TwoFleets(tmp_path, stack)
        await made.start()
        yield made


async def test_an_answer_comes_through_and_is_booked_as_counted_there(
    fleets: TwoFleets, caplog: pytest.LogCaptureFixture
) -> None:
    """Text, log probabilities, seed; our price, their tokens; the key is in no log."""
    caplog.set_level(logging.DEBUG)
    fleets.inner.worker.script = saying("Grüße, 水車")
    fleets.outer.billing.set_price(Price(model=NAME, input_nano_usd=3, output_nano_usd=5))
    body = chat_body("hi", model=NAME, seed=7, top_k=4, logprobs=True, top_logprobs=1)
    async with fleets.outer.http() as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert told["model"] == NAME
        (choice,) = told["choices"]
        assert choice["message"]["content"] == "Grüße, 水車"
        assert choice["finish_reason"] == "stop"
        assert choice["logprobs"]["content"][0]["token"] == "G"
        refused = await client.post("/tokenize", json={"model": NAME, "prompt": "x"})
        assert refused.json()["error"]["param"] == "model"
    (asked,) = fleets.inner.worker.requests
    assert (asked.seed, asked.sampling.top_k) == (7, 4)
    await fleets.outer.settled()
    (here,), (there,) = fleets.outer.usage.closed_events(), fleets.inner.usage.closed_events()
    assert here.usage.prompt_tokens == there.usage.prompt_tokens == told["usage"]["prompt_tokens"]
    assert here.usage.output_tokens == there.usage.output_tokens
    assert here.amount_nano_usd == 3 * here.usage.prompt_tokens + 5 * here.usage.output_tokens
    assert (here.ending, here.estimated) == (ENDING_COMPLETED, False)
    assert fleets.inner.api_key not in caplog.text
    await check_calls(fleets)


async def check_calls(fleets: TwoFleets) -> None:
    """Calls of functions come through as such, streamed, with arguments as one JSON text."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    fleets.inner.worker.script = saying(call)
    body = chat_body("hi", model=NAME, tools=[TOOL], tool_choice="required", stream=True)
    name, arguments, reasons = "", "", []
    async with fleets.outer.openai() as client:
        async for chunk in await client.chat.completions.create(**body):
            for choice in chunk.choices:
                reasons.append(choice.finish_reason)
                for part in choice.delta.tool_calls or ():
                    name += part.function.name or ""
                    arguments += part.function.arguments or ""
    assert (name, json.loads(arguments), reasons[-1]) == ("weather", {"city": "Ulm"}, "tool_calls")


async def test_a_conversation_returns_to_the_server_that_knows_its_beginning(
    fleets: TwoFleets,
) -> None:
    """The router assumes what an engine without events holds; the text's hashes find it."""
    turns = [{"role": "user", "content": "The miller counts his sacks. " * 20}]
    async with fleets.outer.http() as client:
        used = []
        for turn in range(4):
            body = chat_body([*turns, {"role": "user", "content": f"{turn}?"}], model=NAME)
            answer = await client.post("/v1/chat/completions", json=body)
            used.append(answer.headers["x-headrace-replica"])
        story = await client.get(f"/v1/requests/{answer.headers['x-request-id']}")
    assert len(set(used)) == 1
    assert story.json()["routing"]["predicted_hit_blocks"] > 5


async def test_leaving_and_failing_are_told_to_both_sides(fleets: TwoFleets) -> None:
    """A client that leaves closes the connection, and what was made is billed; failures as ours."""
    fleets.inner.worker.switches.delay_per_token_s = 0.02
    fleets.inner.worker.script = saying("x" * 150)
    body = chat_body("hi", model=NAME, stream=True)
    async with fleets.outer.openai() as client:
        stream = await client.chat.completions.create(**body)
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await stream.close()
        await eventually(lambda: len(fleets.inner.worker.cancelled) == 1, within_s=3)
    await fleets.outer.settled()
    (here,) = fleets.outer.usage.closed_events()
    assert here.ending == ENDING_CLIENT_GONE
    assert 0 < here.usage.output_tokens < 150
    assert here.usage.prompt_tokens > 0
    fleets.inner.worker.switches.delay_per_token_s = 0.0
    await check_failures(fleets)


async def check_failures(fleets: TwoFleets) -> None:
    """Wrong requests as such; a full engine as unavailable; a lost stream as not to be resumed."""
    worker = fleets.inner.worker
    async with fleets.outer.http() as client:

        async def ask(content: str, **fields: object) -> tuple[int, str]:
            body = chat_body(content, model=NAME, **fields)
            answer = await client.post("/v1/chat/completions", json=body)
            return answer.status_code, answer.text

        status, text = await ask("x" * 5000)
        assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")
        status, text = await ask("hi", return_token_ids=True)
        assert (status, json.loads(text)["error"]["param"]) == (400, "return_token_ids")
        worker.switches.refuse = True
        status, text = await ask("hi")
        assert status == 503
        worker.switches.refuse = False
        worker.switches.die_after_tokens = 3
        status, text = await ask("hi", stream=True)
        assert status == 200
        assert "cannot be resumed" in text
        assert text.endswith("data: [DONE]\n\n")
        worker.switches.die_after_tokens = None
        assert (await ask("hi"))[0] == 200
    await fleets.outer.settled()
