"""What goes wrong, one thing at a time, and what clients and books see of it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from headrace_common.errors import Internal, QueueFull, ReplicaLost
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Limits
from headrace_contracts.usage.v1 import usage_pb2
from headrace_contracts.worker.v1 import worker_pb2
from headrace_testing.byte_tokenizer import END_OF_TEXT_ID
from headrace_testing.fake_worker import MODEL, FakeWorker, saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually

CHAT = "/v1/chat/completions"


async def ask(fleet: GatewayFleet, key: str | None = None, **fields: Any) -> httpx.Response:
    async with fleet.http(key) as client:
        return await client.post(CHAT, json=chat_body(**fields))


def streamed_text(response: httpx.Response, choice_idx: int = 0) -> str:
    text = ""
    for line in response.text.split("\n\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", []):
                if choice["index"] == choice_idx:
                    text += choice["delta"].get("content") or ""
    return text


def finish_reasons(response: httpx.Response) -> list[str]:
    return [
        choice["finish_reason"]
        for line in response.text.split("\n\n")
        if line.startswith("data: {")
        for choice in json.loads(line[6:]).get("choices", [])
        if choice["finish_reason"]
    ]


def degraded(fleet: GatewayFleet, service: str) -> float:
    value = fleet.gateway.registry.get_sample_value(
        "headrace_gateway_degraded_total", {"dependency": service}
    )
    return value or 0.0


def is_limiter_away(fleet: GatewayFleet) -> float | None:
    return fleet.gateway.registry.get_sample_value("headrace_gateway_limiter_away")


class TestLostWorkers:
    """Streams that survive."""

    @pytest.mark.parametrize("streaming", [True, False])
    @pytest.mark.parametrize("n", [1, 3])
    async def test_answer_goes_on_from_another_worker(
        self, fleet_of_two: GatewayFleet, streaming: bool, n: int
    ) -> None:
        """A worker that dies after some tokens changes nothing of text and usage."""
        fleet = fleet_of_two
        undisturbed = (await ask(fleet, seed=11, n=n)).json()
        await fleet.settled()
        used = fleet.workers[0] if fleet.workers[0].worker.requests else fleet.workers[1]
        used.worker.switches.die_after_tokens = 5 * n
        options = {"include_usage": True} if streaming else None
        answer = await ask(fleet, seed=11, n=n, stream=streaming, stream_options=options)
        for idx in range(n):
            expected = undisturbed["choices"][idx]["message"]["content"]
            if streaming:
                assert streamed_text(answer, idx) == expected
            else:
                assert answer.json()["choices"][idx]["message"]["content"] == expected
        assert used.worker.switches.die_after_tokens
        closed = fleet.usage.closed_events()[-1]
        assert closed.ending == usage_pb2.ENDING_COMPLETED
        assert closed.usage.output_tokens == undisturbed["usage"]["completion_tokens"]
        assert [ref.worker_id for ref in closed.replicas] == ["w0", "w1"] or [
            ref.worker_id for ref in closed.replicas
        ] == ["w1", "w0"]
        assert len(fleet.router.picks[-1].excluded) == 1
        await fleet.settled()

    async def test_connection_cut_in_mid_stream(self, fleet_of_two: GatewayFleet) -> None:
        """A killed process (connection reset) is the same as an error from it."""
        fleet = fleet_of_two
        for server in fleet.workers:
            server.worker.script = saying("abcdefghijklmnopqrst")
            server.worker.switches.delay_per_token_s = 0.02
        asked = asyncio.create_task(ask(fleet, stream=True))
        running = await eventually(
            lambda: next((it for it in fleet.workers if it.worker.running), None)
        )
        await asyncio.sleep(0.1)
        await running.kill()
        answer = await asked
        assert streamed_text(answer) == "abcdefghijklmnopqrst"
        assert finish_reasons(answer) == ["stop"]
        assert len(fleet.usage.closed_events()) == 1

    async def test_held_back_text_survives_a_resume(self, fleet_of_two: GatewayFleet) -> None:
        """Text that the lost worker held back for a stop string comes from the next one."""
        fleet = fleet_of_two
        for server in fleet.workers:
            server.worker.script = saying("one two three")
        fleet.workers[0].worker.switches.die_after_tokens = 6
        fleet.workers[1].worker.switches.die_after_tokens = None
        answer = await ask(fleet, stream=True, stop=["two!"])
        assert streamed_text(answer) == "one two three"

    async def test_stuck_worker_is_left(self, fleet_of_two: GatewayFleet) -> None:
        """When the fleet learns that a replica makes no progress, its streams move."""
        fleet = fleet_of_two
        for server in fleet.workers:
            server.worker.script = saying("steady")
            server.worker.switches.hang_after_tokens = 3
        asked = asyncio.create_task(ask(fleet, stream=True))
        running = await eventually(
            lambda: next((it for it in fleet.workers if it.worker.running), None)
        )
        for server in fleet.workers:
            if server is not running:
                server.worker.switches.hang_after_tokens = None
        fleet.router.set_state(running.worker.worker_id, worker_pb2.WORKER_STATE_STUCK)
        assert streamed_text(await asked) == "steady"
        await eventually(lambda: running.worker.cancelled)

    async def test_full_worker_is_passed_over(self, fleet_of_two: GatewayFleet) -> None:
        """A refusal by one worker's queue is no refusal to the client."""
        fleet_of_two.workers[0].worker.switches.refuse = True
        fleet_of_two.workers[1].worker.script = saying("here")
        for _ in range(2):
            answer = await ask(fleet_of_two)
            assert answer.json()["choices"][0]["message"]["content"] == "here"

    async def test_all_workers_lost_before_the_first_token(self, fleet: GatewayFleet) -> None:
        """No replica left and nothing sent: a real status, retry-after, one closed event."""
        fleet.worker.switches.die_after_tokens = 0
        answer = await ask(fleet)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_replica"
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
        await fleet.settled()
        assert len(fleet.usage.closed_events()) == 1

    async def test_stream_waits_for_a_replacement(self, fleet: GatewayFleet) -> None:
        """The only worker dies; one that comes up a moment later finishes the answer."""
        fleet.worker.script = saying("never lost")
        fleet.worker.switches.die_after_tokens = 4
        asked = asyncio.create_task(ask(fleet, stream=True))
        await eventually(lambda: len(fleet.router.picks) >= 2)
        await fleet.add_worker(FakeWorker(worker_id="w9", script=saying("never lost")))
        assert streamed_text(await asked) == "never lost"

    async def test_failure_after_the_first_token_is_an_error_event(
        self, fleet_parts: GatewayFleet
    ) -> None:
        """Status 200 is out: the error comes as an event, then [DONE]; what was made is billed."""
        fleet_parts.settings = {"max_attempts": 1}
        await fleet_parts.start()
        try:
            fleet_parts.worker.switches.die_after_tokens = 3
            answer = await ask(fleet_parts, stream=True)
            *_, error, done, _ = answer.text.split("\n\n")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "no_replica"
            assert done == "data: [DONE]"
            assert finish_reasons(answer) == []
            (closed,) = fleet_parts.usage.closed_events()
            assert closed.ending == usage_pb2.ENDING_FAILED
            assert closed.usage.output_tokens == 3
        finally:
            await fleet_parts.close()

    async def test_deadline(self, fleet_parts: GatewayFleet) -> None:
        """A request that outlives its time ends with 504 and is closed as such."""
        fleet_parts.settings = {"request_timeout_s": 1.0}
        await fleet_parts.start()
        try:
            fleet_parts.worker.switches.hang_after_tokens = 2
            answer = await ask(fleet_parts)
            assert answer.status_code == 504
            (closed,) = fleet_parts.usage.closed_events()
            assert closed.ending == usage_pb2.ENDING_DEADLINE
            await fleet_parts.settled()
        finally:
            await fleet_parts.close()


class TestClientsThatLeave:
    """A client that hangs up stops the work at once, wherever it is."""

    @pytest.mark.parametrize("streaming", [True, False])
    @pytest.mark.parametrize("tokens_before", [0, 4])
    async def test_leaving_cancels_everything(
        self, fleet: GatewayFleet, streaming: bool, tokens_before: int
    ) -> None:
        """Worker call cancelled, lease settled, load given back, closed once as left."""
        fleet.worker.switches.hang_after_tokens = tokens_before
        asked = asyncio.create_task(ask(fleet, stream=streaming))
        await eventually(lambda: fleet.worker.running)
        await asyncio.sleep(0.1)
        asked.cancel()
        left_s = time.monotonic()
        await eventually(lambda: fleet.worker.cancelled, every_s=0.005)
        assert time.monotonic() - left_s < 0.5
        await fleet.settled()
        (closed,) = fleet.usage.closed_events()
        assert closed.ending == usage_pb2.ENDING_CLIENT_GONE
        assert closed.usage.output_tokens == tokens_before
        assert closed.usage.prompt_tokens > 0
        assert fleet.settled_amounts(closed.request_id).output_tokens == tokens_before
        outcome = {"endpoint": "chat", "outcome": "CLIENT_GONE"}
        await eventually(
            lambda: fleet.gateway.registry.get_sample_value(
                "headrace_gateway_requests_total", outcome
            )
        )

    @pytest.mark.parametrize("streaming", [True, False])
    async def test_leaving_an_unguarded_answer_cancels_it_too(
        self, fleet: GatewayFleet, streaming: bool
    ) -> None:
        """Without a guard one task serves it; the worker hears of it, what was made is billed."""
        key, _ = fleet.new_key(guard_fail_open=True)
        await fleet.guard_server.kill()
        fleet.worker.switches.hang_after_tokens = 4
        asked = asyncio.create_task(ask(fleet, key, stream=streaming))
        await eventually(lambda: fleet.worker.running)
        await asyncio.sleep(0.1)
        asked.cancel()
        await eventually(lambda: fleet.worker.cancelled, within_s=1.0)
        await fleet.settled()
        (closed,) = fleet.usage.closed_events()
        assert (closed.ending, closed.usage.output_tokens) == (usage_pb2.ENDING_CLIENT_GONE, 4)

    async def test_leaving_during_the_body_costs_nothing(self, fleet: GatewayFleet) -> None:
        """Half a body and gone: nothing was admitted."""
        _reader, writer = await asyncio.open_connection("127.0.0.1", fleet.gateway.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {fleet.api_key}\r\n"
        writer.write(head.encode() + b"Content-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        outcome = {"endpoint": "chat", "outcome": "CLIENT_GONE"}
        await eventually(
            lambda: fleet.gateway.registry.get_sample_value(
                "headrace_gateway_requests_total", outcome
            )
        )
        assert fleet.limiter.admits == []

    async def test_client_that_does_not_read_is_cut(self, fleet_parts: GatewayFleet) -> None:
        """A reader that stops holds no worker for longer than the bound."""
        fleet_parts.settings = {"slow_reader_s": 0.3}
        await fleet_parts.start()
        try:
            fleet_parts.worker.script = saying("x")
            fields = {"max_tokens": 4000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
            body = json.dumps(chat_body(stream=True, **fields)).encode()
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", fleet_parts.gateway.port))
            _reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            head += f"{fleet_parts.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await eventually(fleet_parts.usage.closed_events, within_s=15)
            (closed,) = fleet_parts.usage.closed_events()
            assert closed.ending == usage_pb2.ENDING_CLIENT_GONE
            assert closed.usage.output_tokens < 4000
            writer.close()
            await fleet_parts.settled()
        finally:
            await fleet_parts.close()


class TestGuard:
    """Nothing flagged leaks; no verdict is never "clean"."""

    async def test_every_part_of_the_input_is_looked_at(self, fleet: GatewayFleet) -> None:
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

    async def test_tools_and_schemas_are_looked_at(self, fleet: GatewayFleet) -> None:
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

    async def test_prompt_of_ids_is_read_as_text(self, fleet: GatewayFleet) -> None:
        """Token ids are no way around the guard."""
        fleet.guard.blocklist = ["heron"]
        async with fleet.http() as client:
            answer = await client.post(
                "/v1/completions", json={"model": MODEL, "prompt": list(b"a heron")}
            )
        assert answer.json()["error"]["code"] == "content_filter"

    async def test_blocklist_of_the_key_counts(self, fleet: GatewayFleet) -> None:
        """The key's own words travel with each call, input and output."""
        fleet.worker.script = saying("a bittern")
        key, _ = fleet.new_key(guard_blocklist=["bittern"])
        blocked = await ask(fleet, key, content="bittern")
        answer = await ask(fleet, key)
        assert blocked.status_code == 400
        assert answer.json()["choices"][0]["finish_reason"] == "content_filter"
        assert answer.json()["choices"][0]["message"]["content"] == "a "

    async def test_redacted_input_is_what_the_worker_gets(self, fleet: GatewayFleet) -> None:
        """The guard's text replaces the client's before tokenising."""
        fleet.guard.blocklist, fleet.guard.redacts = ["4111"], True
        await ask(fleet, content="card 4111")
        prompt = bytes(i for i in fleet.worker.requests[0].prompt_token_ids if i < END_OF_TEXT_ID)
        assert b"card [redacted blocklist]" in prompt
        assert b"4111" not in prompt

    @pytest.mark.parametrize("streaming", [True, False])
    async def test_blocked_output_never_goes_out(
        self, fleet: GatewayFleet, streaming: bool
    ) -> None:
        """Text up to the word is sent, the word never, not even in log probabilities."""
        fleet.guard.blocklist = ["heron"]
        fleet.worker.script = saying("I see a heron now, and much more follows here")
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

    async def test_one_blocked_choice_does_not_end_the_others(self, fleet: GatewayFleet) -> None:
        """Every choice is judged by itself."""
        fleet.guard.blocklist = ["heron"]
        fleet.worker.script = lambda _p, _s, idx: b"a heron" if idx == 1 else b"a duck"
        choices = (await ask(fleet, n=3)).json()["choices"]
        assert [it["finish_reason"] for it in choices] == ["stop", "content_filter", "stop"]
        assert [it["message"]["content"] for it in choices] == ["a duck", "a ", "a duck"]

    @pytest.mark.parametrize("streaming", [True, False])
    async def test_guard_down_closes_closed_keys_and_opens_open_ones(
        self, fleet: GatewayFleet, streaming: bool
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

    @pytest.mark.parametrize("fails_open", [False, True])
    async def test_a_guard_that_cannot_judge_is_not_counted_as_away(
        self, fleet: GatewayFleet, fails_open: bool
    ) -> None:
        """A client can bring that about, by a part that nothing reads; it must wake nobody."""
        fleet.worker.script = saying("hello")
        key, _ = fleet.new_key(guard_fail_open=fails_open)
        fleet.guard.switches.cannot_look = True
        answer = await ask(fleet, key, stream=True)
        assert answer.status_code == (200 if fails_open else 503)
        assert degraded(fleet, "guard") == 0
        await fleet.settled()

    async def test_guard_lost_in_mid_stream(self, fleet: GatewayFleet) -> None:
        """Closed: the stream ends with an error event. Open: it goes on whole."""
        fleet.worker.script = saying("the heron is late")
        fleet.worker.switches.delay_per_token_s = 0.02
        open_key, _ = fleet.new_key(guard_fail_open=True)

        async def read(key: str) -> str:
            text = ""
            fleet.guard.switches.refuse = False
            body = chat_body(stream=True)
            async with fleet.http(key) as client, client.stream("POST", CHAT, json=body) as answer:
                async for piece in answer.aiter_text():
                    text += piece
                    fleet.guard.switches.refuse = '"content":"t"' in text
            return text

        closed = httpx.Response(200, text=await read(fleet.api_key))
        opened = httpx.Response(200, text=await read(open_key))
        assert "the heron".startswith(streamed_text(closed))
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


class TestRateLimit:
    """Admission and its failures."""

    async def test_denials_are_told_apart(self, fleet: GatewayFleet) -> None:
        """Money: 429, no waiting. Too large: 400. Slots: 429 and when. No store: 503."""
        for limits, status, code, has_retry in (
            (Limits(total_budget_nano_usd=0), 429, "insufficient_quota", False),
            (Limits(tokens_per_minute=20), 400, "request_too_large_for_limit", False),
        ):
            key, _ = fleet.new_key(limits=limits)
            refused = await ask(fleet, key, stream=True)
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
            assert ("retry-after" in refused.headers) == has_retry
        fleet.limiter.degraded = True
        key, _ = fleet.new_key(prepaid=True, limits=Limits(total_budget_nano_usd=10**9))
        unavailable = await ask(fleet, key)
        assert (unavailable.status_code, "retry-after" in unavailable.headers) == (503, True)
        assert fleet.usage.events == []

    async def test_slots_are_held_while_a_request_runs(self, fleet: GatewayFleet) -> None:
        """The second at once is told when to come back, and passes once the first is over."""
        key, _ = fleet.new_key(limits=Limits(max_concurrent=1))
        fleet.worker.switches.hang_after_tokens = 1
        first = asyncio.create_task(ask(fleet, key))
        await eventually(lambda: fleet.worker.running)
        refused = await ask(fleet, key)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        first.cancel()
        await fleet.settled()
        fleet.worker.switches.hang_after_tokens = None
        assert (await ask(fleet, key)).status_code == 200

    async def test_cached_input_counts_only_if_the_plan_says_so(self, fleet: GatewayFleet) -> None:
        """What came from the cache is given back to the input limit, or is not."""
        for counts in (False, True):
            key, _ = fleet.new_key(counts_cached_input=counts)
            for _ in range(2):
                answer = await ask(fleet, key, content="water " * 40)
            await fleet.settled()
            actual = fleet.limiter.settles[-1].actual
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert 0 < cached < actual.input_tokens
            assert actual.cached_input_tokens == (0 if counts else cached)

    async def test_limiter_down(self, fleet: GatewayFleet) -> None:
        """The gateway's share decides, prepaid money is refused; back, the limiter knows of all."""
        prepaid, _ = fleet.new_key(prepaid=True, limits=Limits(total_budget_nano_usd=10**9))
        limited, key = fleet.new_key(limits=Limits(requests_per_minute=3))
        await fleet.limiter_server.kill()
        answers = [await ask(fleet, limited) for _ in range(5)]
        assert [it.status_code for it in answers] == [200] * 3 + [429] * 2
        assert int(answers[-1].headers["retry-after"]) <= 20
        refused = await ask(fleet, prepaid)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert degraded(fleet, "ratelimit") == 3
        assert is_limiter_away(fleet) == 1
        assert len(fleet.usage.closed_events()) == 3
        await fleet.limiter_server.start()
        await eventually(lambda: is_limiter_away(fleet) == 0)
        assert {it.tenant_id for it in fleet.limiter.settles} == {key.tenant_id}
        assert fleet.limiter.live_leases() == []
        assert (await ask(fleet, prepaid)).status_code == 200

    async def test_slots_come_back_however_a_request_ends(self, fleet: GatewayFleet) -> None:
        """Broken body, unknown model, blocked input, lost worker: no lease stays open."""
        fleet.guard.blocklist = ["heron"]
        async with fleet.http() as client:
            await client.post(CHAT, content=b"{bad")
        await ask(fleet, model="none")
        await ask(fleet, content="heron")
        fleet.worker.switches.die_after_tokens = 0
        await ask(fleet)
        await fleet.settled()
        assert {len(fleet.limiter.admits), len(fleet.limiter.settles)} == {2}


class TestRouter:
    """Picking and its failures."""

    async def test_router_down_falls_back_to_the_last_list(
        self, fleet_of_two: GatewayFleet
    ) -> None:
        """Requests go on, to the least loaded of the replicas last seen, and are counted."""
        fleet = fleet_of_two
        await fleet.router_server.kill()
        answers = await asyncio.gather(*(ask(fleet) for _ in range(4)))
        assert {answer.status_code for answer in answers} == {200}
        assert all(server.worker.requests for server in fleet.workers)
        assert degraded(fleet, "router") == 4

    async def test_a_refusal_of_the_router_is_the_clients(self, fleet: GatewayFleet) -> None:
        """A full queue is no outage: it is told, not worked around."""
        fleet.router.refuse_with = QueueFull("The queue is full.", retry_after_s=2.5)
        answer = await ask(fleet)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
        assert fleet.worker.requests == []

    async def test_a_broken_router_is_worked_around(self, fleet: GatewayFleet) -> None:
        """An internal error there is an outage."""
        fleet.router.refuse_with = Internal()
        assert (await ask(fleet)).status_code == 200

    async def test_the_pick_carries_prompt_and_progress(self, fleet: GatewayFleet) -> None:
        """Block hashes, size, tenant; the first token is reported; load comes back."""
        await ask(fleet, content="water " * 20, prompt_cache_key="s1", max_tokens=7)
        (pick,) = fleet.router.picks
        request = fleet.worker.requests[0]
        assert pick.prompt_tokens == len(request.prompt_token_ids)
        assert len(pick.block_hashes) == pick.prompt_tokens // 16 * 16
        assert (pick.tenant_id, pick.session_id) == ("acme", "s1")
        assert pick.expected_output_tokens == 7
        await eventually(lambda: fleet.router.progress)
        await fleet.settled()

    async def test_long_outputs_are_told_to_the_router(self, fleet: GatewayFleet) -> None:
        """Now and then, cumulative: fairness and decode load are counted by it."""
        await ask(fleet, content="water", max_tokens=70)
        await eventually(
            lambda: any(
                m.output_tokens >= 32 for told in fleet.router.progress.values() for m in told
            )
        )
        await fleet.settled()

    async def test_no_ready_replica_is_not_ready(self, fleet: GatewayFleet) -> None:
        """/ready says 503 when the last replica leaves; the model stays known."""
        fleet.router.set_reachable("w0", False)

        async def is_not_ready() -> bool:
            async with fleet.http() as client:
                return (await client.get("/ready")).status_code == 503

        await eventually(is_not_ready)
        assert (await ask(fleet)).status_code == 503


class TestBilling:
    """Keys and prices when billing is away."""

    async def test_known_keys_go_on_unknown_are_refused_politely(self, fleet: GatewayFleet) -> None:
        """Stale for a bound; a key never seen gets 503, not 401."""
        key, _ = fleet.new_key()

        async def goes_on() -> bool:
            fleet.billing.failure = None
            assert (await ask(fleet)).status_code == 200
            fleet.billing.failure = ReplicaLost("down")
            while not degraded(fleet, "billing"):
                # The news of the new key may come only now, and drops the other from the cache.
                if (await ask(fleet)).status_code != 200:
                    return False
            return True

        await eventually(goes_on)
        assert (await ask(fleet, key)).status_code == 503
        assert degraded(fleet, "billing") >= 1
