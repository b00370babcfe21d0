"""/v1/responses over HTTP, with the SDK that applications use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
from pydantic import TypeAdapter
from sqlalchemy import Connection, select

from headrace_common.clock import SystemClock
from headrace_common.errors import Unavailable
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Limits
from headrace_contracts.types.v1.types_pb2 import PRIORITY_BATCH
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.responses_api import background, kept_events
from headrace_gateway.responses_api.event_log import EventLog
from headrace_gateway.responses_api.kept import LEASE_S, KeptResponses
from headrace_gateway.responses_api.kept_events import KeptEvents
from headrace_gateway.state import schema
from headrace_gateway.state.store import Owner, StateStore
from headrace_testing.clock import FakeClock
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually

T = TypeVar("T")


def seen(fleet: GatewayFleet) -> str:
    """The last prompt, control tokens left out."""
    return bytes(i for i in fleet.worker.requests[-1].prompt_token_ids if i < 256).decode()


async def test_a_whole_response_is_kept_and_deleted(fleet: GatewayFleet) -> None:
    """Created, retrieved with the same content, its input listed, deleted, gone."""
    fleet.worker.script = saying("Hello, 水車!")
    async with fleet.openai() as client:
        made = await client.responses.create(
            model=MODEL, input="hi", instructions="Be kind.", metadata={"a": "b"}
        )
        assert (made.output_text, made.status) == ("Hello, 水車!", "completed")
        assert made.usage is not None
        assert made.usage.output_tokens == len("Hello, 水車!".encode()) + 1
        assert "Be kind." in seen(fleet)
        again = await client.responses.retrieve(made.id)
        assert again.model_dump() == made.model_dump()
        items = await client.responses.input_items.list(made.id)
        (item,) = items.data
        assert [(part.type, part.text) for part in item.content] == [("input_text", "hi")]
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
    (closed,) = fleet.usage.closed_events()
    assert (closed.endpoint, closed.ending) == ("responses", usage_pb2.ENDING_COMPLETED)


async def test_the_events_of_a_stream(fleet: GatewayFleet) -> None:
    """All kinds in order, numbered without a gap; the last one carries the whole response."""
    fleet.worker.script = saying("Hi")
    async with fleet.openai() as client:
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]
        kept = await client.responses.retrieve(events[-1].response.id)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "Hi" == events[-1].response.output_text == kept.output_text


async def test_a_conversation_goes_on(fleet: GatewayFleet) -> None:
    """previous_response_id brings all earlier items, but not the instructions."""
    async with fleet.openai() as client:
        fleet.worker.script = saying("one")
        first = await client.responses.create(model=MODEL, input="A?", instructions="Only here.")
        fleet.worker.script = saying("two")
        second = await client.responses.create(
            model=MODEL, input="B?", previous_response_id=first.id
        )
        await client.responses.create(model=MODEL, input="C?", previous_response_id=second.id)
        prompt = seen(fleet)
        assert [prompt.index(it) for it in ("A?", "one", "B?", "two", "C?")] == sorted(
            prompt.index(it) for it in ("A?", "one", "B?", "two", "C?")
        )
        assert "Only here." not in prompt
        await client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match=f"{first.id}.*was deleted") as caught:
            await client.responses.create(model=MODEL, input="D?", previous_response_id=second.id)
        assert caught.value.param == "previous_response_id"


async def test_nobody_sees_anothers_response(fleet: GatewayFleet) -> None:
    """Another tenant's key gets 404, or 400 as an earlier one's; store=false keeps nothing."""
    other, _ = fleet.new_key(tenant_id="rival")
    async with fleet.openai() as client, fleet.openai(other) as rival:
        made = await client.responses.create(model=MODEL, input="hi")
        for ask in (rival.responses.retrieve, rival.responses.delete, rival.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await rival.responses.create(model=MODEL, input="x", previous_response_id=made.id)
        assert caught.value.code == "previous_response_not_found"
        loose = await client.responses.create(model=MODEL, input="hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(loose.id)


async def test_a_key_for_usage_alone_sees_no_content(fleet: GatewayFleet) -> None:
    """403 for responses and files that keys for inference of the same project see."""
    meter, _ = fleet.new_key(scopes=["usage"])
    async with fleet.openai() as client, fleet.openai(meter) as other:
        made = await client.responses.create(model=MODEL, input="hi")
        with pytest.raises(openai.PermissionDeniedError):
            await other.responses.retrieve(made.id)
        with pytest.raises(openai.PermissionDeniedError):
            await other.files.list()


async def test_a_response_in_the_background(fleet: GatewayFleet) -> None:
    """Told as queued at once, found completed later, billed once."""
    fleet.worker.script = saying("done")
    async with fleet.openai() as client:
        made = await client.responses.create(model=MODEL, input="hi", background=True)
        assert made.status == "queued"

        async def is_completed() -> bool:
            return (await client.responses.retrieve(made.id)).status == "completed"

        await eventually(is_completed)
        assert (await client.responses.retrieve(made.id)).output_text == "done"
    assert len(fleet.usage.closed_events()) == 1


async def test_a_background_response_may_end_while_its_gateway_drains(
    fleet_parts: GatewayFleet,
) -> None:
    """As one whose client waits."""
    await fleet_parts.start()
    fleet_parts.worker.script = saying("x" * 20)
    fleet_parts.worker.switches.delay_per_token_s = 0.05
    async with fleet_parts.openai() as client:
        made = await client.responses.create(model=MODEL, input="hi", background=True)
    await eventually(lambda: fleet_parts.worker.running, within_s=5)
    await fleet_parts.restart_gateway()
    async with fleet_parts.openai() as client:
        assert (await client.responses.retrieve(made.id)).status == "completed"
    assert len(fleet_parts.worker.requests) == 1
    await fleet_parts.close()


async def test_a_background_response_is_cancelled(fleet: GatewayFleet) -> None:
    """The work stops at the worker and what was made is billed."""
    fleet.worker.switches.delay_per_token_s = 0.2
    async with fleet.openai() as client:
        made = await client.responses.create(model=MODEL, input="hi", background=True)

        async def is_in_progress() -> bool:
            return (await client.responses.retrieve(made.id)).status == "in_progress"

        await eventually(is_in_progress)
        assert fleet.worker.running
        ended = await client.responses.cancel(made.id)
        assert ended.status == "cancelled"
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        whole = await client.responses.create(model=MODEL, input="hi", max_output_tokens=1)
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(whole.id)
    await fleet.settled()
    assert fleet.worker.cancelled
    assert fleet.usage.closed_events()[0].ending == usage_pb2.ENDING_CLIENT_GONE


def _queued(status: str = "queued") -> dict[str, Any]:
    return {"id": "resp_1", "status": status, "previous_response_id": None}


async def test_a_response_ends_once(tmp_path: Path, clock: FakeClock) -> None:
    """Told as failed since nobody seemed to work on it, it stays so, whoever turns up later."""
    state, owner = StateStore(f"sqlite:///{tmp_path / 's.sqlite3'}", clock), Owner("t", "p")
    kept = KeptResponses(state, 600)
    await kept.keep(owner, _queued(), [], "req_1")
    clock.advance(LEASE_S + 1)
    assert (await kept.find(owner, "resp_1")).response["status"] == "failed"
    assert not await kept.finish(_queued("cancelled"), 1)
    assert (await kept.find(owner, "resp_1")).response["status"] == "failed"
    await state.close()


async def test_who_looks_spoils_no_end(tmp_path: Path, clock: FakeClock) -> None:
    """The answer comes in the moment in which it is found to be late: it is told and stays."""
    url, owner = f"sqlite:///{tmp_path / 's.sqlite3'}", Owner("t", "p")

    class Late(StateStore):
        async def read(self, work: Callable[[Connection], T], whose: str = "") -> T:
            found = await super().read(work, whose)
            await kept.finish(_queued("completed"), 1)
            return found

    state, late = StateStore(url, clock), Late(url, clock)
    kept = KeptResponses(state, 600)
    await kept.keep(owner, _queued(), [], "req_1")
    clock.advance(LEASE_S + 1)
    for store in (late, state):
        found = await KeptResponses(store, 600).find(owner, "resp_1")
        assert (found.response["status"], found.is_finished) == ("completed", True)
        await store.close()


@pytest.mark.parametrize("start", [0, 1])
async def test_a_stream_whose_process_died_is_ended(
    tmp_path: Path, clock: FakeClock, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the response as it is kept, also for who has seen all that came before."""
    monkeypatch.setattr(kept_events, "_POLL_S", 0.01)
    state = StateStore(f"sqlite:///{tmp_path / 's.sqlite3'}", clock)
    kept, events, owner = KeptResponses(state, 600), KeptEvents(state, 600), Owner("t", "p")
    await kept.keep(owner, _queued(), [], "req_1")
    log = EventLog("resp_1", 10.0)
    log.tell("response.created", _queued())
    await events.keep(log)
    await kept.finish(_queued("completed"), 1)
    find = partial(kept.find, owner, "resp_1")
    told = b"".join([it async for it in events.follow(find, "resp_1", start)])
    assert told.count(b"event: ") == 2 - start
    assert b"event: response.completed\n" in told
    await state.close()


async def test_of_a_deleted_response_nothing_stays(fleet: GatewayFleet) -> None:
    """Nor do the events come back that its process had not written yet."""
    fleet.worker.switches.delay_per_token_s = 0.05
    async with fleet.openai() as client:
        stream = await client.responses.create(
            model=MODEL, input="hi", background=True, stream=True
        )
        events = aiter(stream)
        begun = await anext(events)
        while (await anext(events)).type != "response.output_text.delta":
            pass
        await client.responses.delete(begun.response.id)
        assert [event.type async for event in events][-1] == "response.failed"
    await fleet.settled()
    await fleet.restart_gateway()
    state = StateStore(f"sqlite:///{fleet.folder}/state.sqlite3", SystemClock())
    asked = (select(schema.responses), select(schema.response_events))
    assert await state.read(lambda it: [it.execute(one).all() for one in asked]) == [[], []]
    await state.close()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_log_probabilities_of_a_call_make_no_message(
    fleet: GatewayFleet, is_stream: bool
) -> None:
    """The call is all that the answer holds."""
    call = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    fleet.worker.script = saying(f"<tool_call>\n{call}\n</tool_call>")
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    ask: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": [tool], "top_logprobs": 2}
    async with fleet.openai() as client:
        if is_stream:
            stream = await client.responses.create(**ask, stream=True)
            made = [event async for event in stream][-1].response
        else:
            made = await client.responses.create(**ask)
    assert [(it.type, it.arguments) for it in made.output] == [
        ("function_call", '{"city": "Bonn"}')
    ]


async def test_an_item_without_an_id_gets_one(fleet: GatewayFleet) -> None:
    """Also where the client says null, so that a list of them can be turned page by page."""
    given: Any = [{"role": "user", "content": it, "id": None} for it in "abc"]
    async with fleet.openai() as client:
        made = await client.responses.create(model=MODEL, input=given)
        items = [it async for it in client.responses.input_items.list(made.id, limit=1)]
    assert [it.content[0].text for it in items] == ["c", "b", "a"]
    assert len({it.id for it in items}) == 3


async def test_items_given_are_listed_as_the_sdk_types_them(fleet: GatewayFleet) -> None:
    """Read strictly: with the status that clients leave out."""
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "call_id": "b", "name": "c", "input": "x"}
    outputs = [
        {"type": f"{kind}_output", "call_id": call_id, "output": "x"}
        for kind, call_id in (("function_call", "a"), ("custom_tool_call", "b"))
    ]
    said = {"role": "assistant", "content": "Well."}
    given: Any = [{"role": "user", "content": "hi"}, said, call, custom, *outputs]
    async with fleet.openai() as client:
        made = await client.responses.create(model=MODEL, input=given)
        listed = await client.responses.input_items.with_raw_response.list(made.id)
        await client.responses.create(model=MODEL, input="on", previous_response_id=made.id)
    kind = TypeAdapter(openai.types.responses.ResponseItemList)
    assert len(kind.validate_json(listed.text, strict=True).data) == 6


async def test_a_response_has_a_class_of_service(fleet: GatewayFleet) -> None:
    """As a chat has: flex waits for gaps at the batch price, priority takes a key that has it."""
    async with fleet.openai() as client:
        made = await client.responses.create(model=MODEL, input="hi", service_tier="flex")
        assert made.service_tier == "flex"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="hi", service_tier="priority")
    assert caught.value.param == "service_tier"
    (closed,) = fleet.usage.closed_events()
    assert closed.price_tier == usage_pb2.PRICE_TIER_BATCH
    assert fleet.worker.requests[-1].priority == PRIORITY_BATCH


async def test_a_moment_without_the_state_loses_no_response(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made and paid for, it is kept once the state takes it."""
    fleet.worker.switches.delay_per_token_s = 0.02

    async def refuse(_work: object, _whose: str = "") -> None:
        raise Unavailable("away")

    async with fleet.openai() as client:
        made = await client.responses.create(model=MODEL, input="hi", background=True)
        await eventually(lambda: fleet.worker.running)
        monkeypatch.setattr(fleet.gateway._state, "write", refuse)
        await eventually(fleet.usage.closed_events)
        await asyncio.sleep(0.2)
        monkeypatch.undo()

        async def is_completed() -> bool:
            return (await client.responses.retrieve(made.id)).status == "completed"

        await eventually(is_completed)


async def test_input_tokens_equal_the_prompt_of_an_answer(fleet: GatewayFleet) -> None:
    """With all that it continues; what no prompt is made of is refused by name."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    ask: Any = {"model": MODEL, "input": "B?", "instructions": "Be kind.", "tools": [tool]}
    async with fleet.openai() as client:
        first = await client.responses.create(model=MODEL, input="A?", max_output_tokens=5)
        ask["previous_response_id"] = first.id
        num_events = len(fleet.usage.events)
        counted = await client.responses.input_tokens.count(**ask)
        assert len(fleet.usage.events) == num_events
        made = await client.responses.create(**ask, max_output_tokens=1)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.input_tokens.count(**ask, extra_body={"max_output_tokens": 1})
    assert counted.input_tokens == made.usage.input_tokens
    assert caught.value.param == "max_output_tokens"


async def test_what_is_not_offered_is_an_unknown_url(fleet: GatewayFleet) -> None:
    """POSTs below /v1/responses that are nowhere get 404 in the usual shape, not 405."""
    async with fleet.http() as client:
        answers = [
            await client.post(f"/v1/responses/compact{query}", json={})
            for query in ("", "?stream=true")
        ]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


async def test_a_short_answer_is_incomplete(fleet: GatewayFleet) -> None:
    """max_output_tokens ends it and says so; it can be continued."""
    async with fleet.openai() as client:
        made = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
        assert made.status == "incomplete"
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        await client.responses.create(model=MODEL, input="go on", previous_response_id=made.id)


async def test_items_become_messages(fleet: GatewayFleet) -> None:
    """Messages with parts, calls and their outputs, reasoning left out; log probabilities told."""
    items: Any = [
        {"role": "developer", "content": "Rule."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Q1"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A1"}]},
        {"role": "user", "content": "Q2"},
    ]
    async with fleet.openai() as client:
        made = await client.responses.create(
            model=MODEL,
            input=items,
            max_output_tokens=3,
            top_logprobs=2,
            include=["message.output_text.logprobs"],
        )
    content: Any = made.output[0]
    assert len(content.content[0].logprobs) == 3
    assert len(content.content[0].logprobs[0].top_logprobs) == 2
    assert [part.path for part in fleet.guard.inputs[-1].parts] == [
        f"input[{idx}].content" for idx in (0, 1, 3, 4)
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
            "input[0].call_id",
        ),
        ({"background": True, "store": False}, "store"),
        ({"truncation": "auto"}, "truncation"),
        (
            {"tools": [{"type": "function", "name": "f", "output_schema": {"type": "object"}}]},
            "tools[0].output_schema",
        ),
        ({"max_output_tokens": 10_000_000}, "max_output_tokens"),
        ({"model": "nope"}, "model"),
    ],
)
async def test_mistakes_are_named(fleet: GatewayFleet, fields: Any, param: str) -> None:
    """400 (or 404) with the client's own name of the field; nothing is billed."""
    async with fleet.openai() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.create(**{"model": MODEL, "input": "hi", **fields})
    assert caught.value.param == param
    assert fleet.usage.events == []


async def test_a_background_response_is_streamed_and_taken_up_again(fleet: GatewayFleet) -> None:
    """Who leaves comes back by the last number he saw; the text is whole, the bill is one."""
    fleet.worker.script = saying("Hello, 水車!")
    fleet.worker.switches.delay_per_token_s = 0.02
    async with fleet.openai() as client:
        stream = await client.responses.create(
            model=MODEL, input="hi", background=True, stream=True
        )
        first: list[Any] = []
        async for event in stream:
            first.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        response_id = first[0].response.id
        seen_last = first[-1].sequence_number
        rest = [
            event
            async for event in await client.responses.retrieve(
                response_id, stream=True, starting_after=seen_last
            )
        ]
        later = [event async for event in await client.responses.retrieve(response_id, stream=True)]
        kept = await client.responses.retrieve(response_id)
    assert [it.type for it in first[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    whole = first + rest
    assert [it.sequence_number for it in whole] == list(range(len(whole)))
    assert [it.model_dump() for it in later] == [it.model_dump() for it in whole]
    text = "".join(it.delta for it in whole if it.type == "response.output_text.delta")
    assert text == "Hello, 水車!" == kept.output_text
    assert whole[-1].type == "response.completed"
    assert len(fleet.usage.closed_events()) == 1


async def test_another_process_tells_the_events_too(fleet: GatewayFleet) -> None:
    """While they come, and when the process that made them is gone."""
    fleet.settings["state_url"] = f"sqlite:///{fleet.folder}/shared.sqlite3"
    await fleet.restart_gateway()
    other = await fleet.add_gateway()
    fleet.worker.script = saying("Hello")
    fleet.worker.switches.delay_per_token_s = 0.1
    url = f"http://127.0.0.1:{other.port}/v1/responses"
    async with fleet.openai() as client, fleet.http() as http:
        made = await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        begun = await anext(aiter(made))
        answer = await http.get(f"{url}/{begun.response.id}", params={"stream": "true"})
        await made.close()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.text.splitlines() if line.startswith("event: ")]
        assert lines[0] == "event: response.created"
        assert lines[-1] == "event: response.completed"
        assert lines.count("event: response.output_text.delta") == len("Hello")
        plain = await client.responses.create(model=MODEL, input="hi", background=True)
        for params, param in (
            ({"stream": "true"}, "stream"),
            ({"starting_after": 2}, "starting_after"),
        ):
            refused = await http.get(f"{url}/{plain.id}", params=params)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_cancelled_stream_ends(fleet: GatewayFleet) -> None:
    """Its last event carries the status; a deleted one's events are gone."""
    fleet.worker.switches.delay_per_token_s = 0.05
    async with fleet.openai() as client:
        stream = await client.responses.create(
            model=MODEL, input="hi", background=True, stream=True
        )
        begun = await anext(aiter(stream))
        await client.responses.cancel(begun.response.id)
        *_, last = [event async for event in stream]
        assert (last.type, last.response.status) == ("response.failed", "cancelled")
        await client.responses.delete(begun.response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.response.id, stream=True)


async def test_a_refusal_is_told_before_a_response_is_queued(fleet: GatewayFleet) -> None:
    """By its status, as without `background`; nothing of it is kept."""
    seldom, _ = fleet.new_key(limits=Limits(requests_per_minute=1))
    poor, _ = fleet.new_key(limits=Limits(total_budget_nano_usd=0))
    fleet.guard.blocklist = ["forbidden"]
    body = {"model": MODEL, "input": "hi", "background": True}
    refusals: list[tuple[str, dict[str, Any], int, str]] = [
        (seldom, {}, 429, "rate_limit_exceeded"),
        (poor, {}, 429, "insufficient_quota"),
        (fleet.api_key, {"input": "x " * 9000}, 400, "context_length_exceeded"),
        (fleet.api_key, {"input": "a forbidden word"}, 400, "content_filter"),
        (fleet.api_key, {"model": "nobody"}, 404, "model_not_found"),
    ]
    async with fleet.http(seldom) as client:
        taken = await client.post("/v1/responses", json=body)
        assert (taken.status_code, taken.json()["status"]) == (200, "queued")
        assert taken.headers["x-ratelimit-remaining-requests"] == "0"
    await fleet.settled()
    for key, fields, status, code in refusals:
        for is_stream in (False, True):
            async with fleet.http(key) as client:
                asked = {**body, **fields, "stream": is_stream}
                refused = await client.post("/v1/responses", json=asked)
            told = refused.json()["error"]
            assert (refused.status_code, told["code"]) == (status, code), refused.text
            serial = refused.headers["x-request-id"].removeprefix("req_")
            async with fleet.http(key) as client:
                assert (await client.get(f"/v1/responses/resp_{serial}")).status_code == 404
    await fleet.settled()
    assert len(fleet.usage.closed_events()) == 1


async def test_what_cannot_be_kept_is_not_begun(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the state nobody could ever read it; its slot and hold are given back."""

    async def refuse(_work: object, _whose: str = "") -> None:
        raise Unavailable("away")

    monkeypatch.setattr(fleet.gateway._state, "write", refuse)
    body = {"model": MODEL, "input": "hi", "background": True}
    key, _ = fleet.new_key(limits=Limits(max_concurrent=1))
    async with fleet.http(key) as client:
        for _ in range(3):
            assert (await client.post("/v1/responses", json=body)).status_code == 503
        monkeypatch.undo()
        assert (await client.post("/v1/responses", json=body)).status_code == 200
    await fleet.settled()
    assert len(fleet.worker.requests) == 1


async def test_no_more_run_in_the_background_than_may(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those that come at the same moment; none has more than are left to others."""
    monkeypatch.setattr(background, "MAX_RUNNING", 6)
    fleet.worker.switches.delay_per_token_s = 0.05
    body = {"model": MODEL, "input": "hi", "background": True, "max_output_tokens": 32}
    other, _ = fleet.new_key(tenant_id="rival")
    async with fleet.http() as client, fleet.http(other) as rival:
        answers = await asyncio.gather(*(client.post("/v1/responses", json=body) for _ in range(8)))
        beside = await rival.post("/v1/responses", json=body)
    told = sorted(it.status_code for it in answers)
    assert told == [200] * 3 + [503] * 5
    assert beside.status_code == 200
    await fleet.settled()
