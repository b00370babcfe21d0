"""/v1/files and /v1/batches over HTTP, with the SDK that applications use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from headrace_common.errors import Unavailable
from headrace_common.price_rows import cached_tokens
from headrace_contracts.types.v1.types_pb2 import PRIORITY_BATCH
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.batch_api import batch_routes, file_routes, stored_files
from headrace_gateway.batch_api.input_lines import MAX_LINE_BYTES
from headrace_gateway.batch_api.line_call import LineCaller, LineOutcome
from headrace_gateway.batch_api.line_log import LineLog
from headrace_gateway.batch_api.stored_batches import StoredBatches
from headrace_gateway.batch_api.stored_files import StoredFiles
from headrace_gateway.principal import Principal
from headrace_gateway.prompt import PromptEncoder
from headrace_gateway.state.store import Owner
from headrace_testing.fake_worker import MODEL, FakeWorker
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.postgres import LocalPostgres
from headrace_testing.waiting import eventually

URL = "/v1/chat/completions"


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {**body, **fields}}


def jsonl(*lines: Any) -> bytes:
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    return "\n".join(texts).encode()


async def upload(client: openai.AsyncOpenAI, *lines: Any) -> str:
    made = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return made.id


async def start(client: openai.AsyncOpenAI, *lines: Any) -> str:
    file_id = await upload(client, *lines)
    made = await client.batches.create(
        input_file_id=file_id, endpoint=URL, completion_window="24h", metadata={"a": "b"}
    )
    assert made.status in ("validating", "in_progress")
    return made.id


async def ended(client: openai.AsyncOpenAI, batch_id: str, status: str = "completed") -> Any:
    async def is_over() -> Any:
        batch = await client.batches.retrieve(batch_id)
        assert batch.status == status, batch
        return batch

    return await eventually(is_over, within_s=20, every_s=0.1)


async def results(client: openai.AsyncOpenAI, file_id: str) -> list[dict[str, Any]]:
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


async def test_files_are_kept_listed_and_deleted(fleet: GatewayFleet) -> None:
    """What goes in comes out; nobody else sees it; deleted is gone."""
    other, _ = fleet.new_key(tenant_id="rival")
    async with fleet.openai() as client, fleet.openai(other) as rival:
        content = b'{"a": 1}\n' * 200_000
        made = await client.files.create(file=("big.jsonl", content), purpose="batch")
        assert (made.bytes, made.filename, made.status) == (len(content), "big.jsonl", "processed")
        download = await client.files.content(made.id)
        assert download.content == content
        assert download.response.headers["content-length"] == str(len(content))
        assert [one.id async for one in client.files.list()] == [made.id]
        assert [one.id async for one in rival.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await rival.files.content(made.id)
        await client.files.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(made.id)


@pytest.mark.parametrize("leaves", [True, False])
async def test_an_upload_that_breaks_off_is_no_mistake_of_ours(
    fleet: GatewayFleet,
    leaves: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever leaves is forgotten, whoever falls silent is told so."""
    monkeypatch.setattr(file_routes, "_PIECE_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.gateway.port)
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nhost: here\r\ncontent-length: 999\r\n"
        b"content-type: multipart/form-data; boundary=x\r\nauthorization: Bearer %s\r\n\r\n--x\r\n"
        % fleet.api_key.encode()
    )
    await writer.drain()
    if leaves:
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.sleep(0.3)
    else:
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()
    assert not [it for it in caplog.records if it.levelname == "ERROR"]
    async with fleet.openai() as client:
        assert [one async for one in client.files.list()] == []


async def test_a_batch_from_lines_to_results(fleet: GatewayFleet) -> None:
    """One result a line, good ones and wrong ones apart; batch class, lowest priority, one bill."""
    async with fleet.openai() as client:
        batch_id = await start(client, line("a"), line("b"), line("c", temperature=9), line("d"))
        batch = await ended(client, batch_id)
        good = await results(client, batch.output_file_id)
        (wrong,) = await results(client, batch.error_file_id)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
    assert [one["custom_id"] for one in good] == ["a", "b", "d"]
    assert all(one["response"]["status_code"] == 200 for one in good)
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in good)
    assert wrong["custom_id"] == "c"
    assert wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    closed = fleet.usage.closed_events()
    assert sorted(it.request_id for it in closed) == sorted(
        one["response"]["request_id"] for one in good
    )
    assert {it.price_tier for it in closed} == {usage_pb2.PRICE_TIER_BATCH}
    assert {it.priority for it in fleet.worker.requests} == {PRIORITY_BATCH}
    assert {it.priority for it in fleet.router.picks} == {PRIORITY_BATCH}


@pytest.mark.parametrize("url", [URL, "/v1/embeddings"])
async def test_a_batch_tells_what_its_answers_used(fleet: GatewayFleet, url: str) -> None:
    """The sum of its lines, which is the sum in the books; not told before it is known."""
    texts = ["a", "bb" * 40, "bb" * 40, "d"]
    lines: list[dict[str, Any]] = []
    for idx, text in enumerate(texts):
        asked = line(text)
        if url != URL:
            asked |= {"url": url, "body": {"model": MODEL, "input": text}}
        lines.append({**asked, "custom_id": str(idx)})
    lines.append({**lines[0], "custom_id": "wrong", "body": {"model": "none"}})
    async with fleet.openai() as client:
        file_id = await upload(client, *lines)
        made = await client.batches.create(
            input_file_id=file_id, endpoint=url, completion_window="24h"
        )
        assert made.usage is None
        batch = await ended(client, made.id)
    closed = [it.usage for it in fleet.usage.closed_events()]
    assert len(closed) == 4
    assert batch.usage.input_tokens == sum(it.prompt_tokens for it in closed) > 0
    assert batch.usage.output_tokens == sum(it.output_tokens for it in closed)
    assert (batch.usage.output_tokens > 0) == (url == URL)
    cached = sum(cached_tokens(it) for it in closed)
    assert batch.usage.input_tokens_details.cached_tokens == cached
    assert batch.usage.output_tokens_details.reasoning_tokens == 0
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens


async def test_a_file_may_begin_with_a_byte_order_mark(fleet: GatewayFleet) -> None:
    """As some editors write it; lines may end in CR LF, too."""
    async with fleet.openai() as client:
        batch_id = await start(client, "\ufeff" + json.dumps(line("a")) + "\r", line("b"))
        batch = await ended(client, batch_id)
    assert (batch.request_counts.total, batch.request_counts.completed) == (2, 2)


async def test_mistakes_are_told_by_line(fleet: GatewayFleet) -> None:
    """A file with a wrong line runs not at all; every mistake is told with its line."""
    async with fleet.openai() as client:
        batch_id = await start(
            client,
            line("a"),
            "{not json",
            "",
            line("a"),
            {**line("b"), "url": "/v1/embeddings"},
            {**line("c"), "method": "GET"},
            line("d", stream=True),
            {"custom_id": "e"},
            line("f\0"),
        )
        batch = await ended(client, batch_id, "failed")
    told = [(it.line, it.code) for it in batch.errors.data]
    assert told == [
        (2, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "mismatched_url"),
        (6, "invalid_method"),
        (7, "invalid_request"),
        (8, "invalid_line"),
        (9, "invalid_custom_id"),
    ]
    assert fleet.worker.requests == []


async def test_a_line_too_long_is_told_by_its_number(fleet: GatewayFleet) -> None:
    """Also where its end and the next line's beginning are read together."""
    async with fleet.openai() as client:
        long = line("b", user="x" * MAX_LINE_BYTES)
        batch = await ended(client, await start(client, line("a"), long, line("c")), "failed")
    assert [(it.line, it.code) for it in batch.errors.data] == [(2, "line_too_long")]


async def test_an_input_file_deleted_while_it_is_read_runs_not_in_part(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch fails as a whole."""
    read = StoredFiles.read

    async def cut_short(stored: StoredFiles, owner: Owner, file_id: str) -> AsyncIterator[bytes]:
        async for piece in read(stored, owner, file_id):
            yield piece
            await client.files.delete(file_id)

    monkeypatch.setattr(StoredFiles, "read", cut_short)
    monkeypatch.setattr(stored_files, "CHUNK_BYTES", 1000)
    async with fleet.openai() as client:
        lines = [line(f"l{idx}") for idx in range(20)]
        batch = await ended(client, await start(client, *lines), "failed")
    assert [it.code for it in batch.errors.data] == ["input_file_deleted"]
    assert fleet.worker.requests == []


async def test_a_batch_is_cancelled(fleet: GatewayFleet) -> None:
    """What is answered stays, the rest is told as cancelled; each line has one result."""
    fleet.worker.switches.delay_per_token_s = 0.1
    lines = [line(f"l{idx}") for idx in range(30)]
    async with fleet.openai() as client:
        batch_id = await start(client, *lines)

        async def some_done() -> bool:
            counts = (await client.batches.retrieve(batch_id)).request_counts
            return counts is not None and counts.completed >= 2

        await eventually(some_done, within_s=20)
        assert (await client.batches.cancel(batch_id)).status in ("cancelling", "cancelled")
        batch = await ended(client, batch_id, "cancelled")
        good = await results(client, batch.output_file_id)
        rest = await results(client, batch.error_file_id)
    ids = [one["custom_id"] for one in good + rest]
    assert sorted(ids) == sorted(one["custom_id"] for one in lines)
    assert {one["error"]["code"] for one in rest} == {"batch_cancelled"}
    await fleet.settled()


async def test_a_batch_that_is_over_cannot_be_cancelled(fleet: GatewayFleet) -> None:
    """Whoever asks is told; asked twice for a cancelled one, nothing is wrong."""
    fleet.worker.switches.delay_per_token_s = 0.05
    async with fleet.openai() as client:
        over = await start(client, line("a"))
        await ended(client, over)
        with pytest.raises(openai.ConflictError) as caught:
            await client.batches.cancel(over)
        assert caught.value.code == "batch_over"
        assert (await client.batches.retrieve(over)).status == "completed"
        running = await start(client, *[line(f"l{idx}") for idx in range(9)])
        await client.batches.cancel(running)
        await ended(client, running, "cancelled")
        assert (await client.batches.cancel(running)).status == "cancelled"
    await fleet.settled()


async def test_results_are_no_input(fleet: GatewayFleet) -> None:
    """The file that a batch made has another purpose, and is refused at once."""
    async with fleet.openai() as client:
        batch = await ended(client, await start(client, line("a")))
        with pytest.raises(openai.BadRequestError) as caught:
            await client.batches.create(
                input_file_id=batch.output_file_id, endpoint=URL, completion_window="24h"
            )
    assert caught.value.param == "input_file_id"


async def test_a_revoked_key_ends_its_batch(fleet: GatewayFleet) -> None:
    """What was answered, and is paid for, can still be had by the project's other keys."""
    fleet.worker.switches.delay_per_token_s = 0.05
    mine, key = fleet.new_key(project_id=fleet.key.project_id)
    async with fleet.openai(mine) as owner, fleet.openai() as client:
        batch_id = await start(owner, *[line(f"l{idx}") for idx in range(20)])

        async def some_done() -> bool:
            return (await client.batches.retrieve(batch_id)).request_counts.completed >= 2

        await eventually(some_done, within_s=20)
        fleet.billing.revoke(key.key_id)
        batch = await ended(client, batch_id, "failed")
        good = await results(client, batch.output_file_id)
        rest = await results(client, batch.error_file_id)
    assert [it.code for it in batch.errors.data] == ["invalid_api_key"]
    assert len(good) >= 2
    assert {one["error"]["code"] for one in rest} == {"batch_failed"}
    assert len(good) + len(rest) == 20
    await fleet.settled()


async def test_a_line_that_breaks_the_gateway_holds_nothing_up(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake of ours is that line's result; the others are answered."""
    encode = PromptEncoder.encode_chat

    def broken(encoder: PromptEncoder, messages: Any, *args: Any) -> Any:
        if messages[-1]["content"] == "b":
            raise ZeroDivisionError
        return encode(encoder, messages, *args)

    monkeypatch.setattr(PromptEncoder, "encode_chat", broken)
    async with fleet.openai() as client:
        batch = await ended(client, await start(client, line("a"), line("b"), line("c")))
        (wrong,) = await results(client, batch.error_file_id)
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("b", 500)
    assert batch.request_counts.completed == 2


async def test_a_batch_survives_its_gateway(fleet_parts: GatewayFleet) -> None:
    """Another process goes on: answered lines stay, the others run, each has one result."""
    await fleet_parts.start()
    fleet_parts.worker.switches.delay_per_token_s = 0.05
    async with fleet_parts.openai() as client:
        batch_id = await start(client, *[line(f"l{idx}") for idx in range(12)])

        async def some_done() -> bool:
            counts = (await client.batches.retrieve(batch_id)).request_counts
            return counts is not None and counts.completed >= 2

        await eventually(some_done, within_s=20)
    await fleet_parts.restart_gateway()
    fleet_parts.worker.switches.delay_per_token_s = 0.0
    async with fleet_parts.openai() as client:
        batch = await ended(client, batch_id)
        good = await results(client, batch.output_file_id)
    assert [one["custom_id"] for one in good] == [f"l{idx}" for idx in range(12)]
    assert batch.error_file_id is None
    check_paid_once(fleet_parts, good)
    await fleet_parts.close()


async def test_what_is_paid_is_kept_when_its_gateway_stops(
    fleet_parts: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the disk takes its time to close it: a line is not answered and booked again."""
    real = LineLog.closed

    def closed(log: LineLog, event: usage_pb2.UsageEvent) -> asyncio.Future[None]:
        real(log, event)
        loop = asyncio.get_running_loop()
        recorded = loop.create_future()
        loop.call_later(0.5, recorded.set_result, None)
        return recorded

    monkeypatch.setattr(LineLog, "closed", closed)
    await fleet_parts.start()
    async with fleet_parts.openai() as client:
        batch_id = await start(client, *[line(f"l{idx}") for idx in range(6)])
        await eventually(lambda: fleet_parts.usage.closed_events(), within_s=10)
    await fleet_parts.restart_gateway()
    async with fleet_parts.openai() as client:
        batch = await ended(client, batch_id)
        check_paid_once(fleet_parts, await results(client, batch.output_file_id))
    await fleet_parts.close()


def tries(monkeypatch: pytest.MonkeyPatch) -> list[LineOutcome]:
    """Return a list that gets what comes of each try of a line from now on."""
    outcomes: list[LineOutcome] = []
    real = LineCaller.call

    async def call(*args: Any) -> LineOutcome:
        outcomes.append(await real(*args))
        return outcomes[-1]

    monkeypatch.setattr(LineCaller, "call", call)
    return outcomes


def failing(monkeypatch: pytest.MonkeyPatch, *names: str) -> set[str]:
    """Return a set that gets the names of those calls of the state that fail from now on."""
    failed: set[str] = set()

    def watched(name: str) -> Any:  # Any: a method
        real = getattr(StoredBatches, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await real(*args, **kwargs)
            except Unavailable:
                failed.add(name)
                raise

        return call

    for name in names:
        monkeypatch.setattr(StoredBatches, name, watched(name))
    return failed


async def test_a_moment_without_the_state_costs_no_answer_twice(
    fleet_parts: GatewayFleet, own_postgres: LocalPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being answered goes on; its results are kept once they can be."""
    calls = ("claim", "renew", "end_line")
    failed = failing(monkeypatch, *calls)
    fleet_parts.settings["state_url"] = own_postgres.create_database()
    await fleet_parts.start()
    fleet_parts.worker.switches.delay_per_token_s = 0.3
    async with fleet_parts.openai() as client:
        batch_id = await start(client, *[line(f"l{idx}") for idx in range(8)])
        await eventually(lambda: len(fleet_parts.worker.running) == 4)
        await asyncio.to_thread(own_postgres.stop)
        await eventually(lambda: not fleet_parts.worker.running)
        await eventually(lambda: failed == set(calls), within_s=15)
        await asyncio.to_thread(own_postgres.start)
        batch = await ended(client, batch_id)
    assert batch.request_counts.completed == 8
    assert len(fleet_parts.worker.requests) == 8
    await fleet_parts.close()


async def test_a_batch_expires_while_billing_is_away(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whose the key is, and no line waits beyond the batch's time."""

    class Away:
        async def resolve(self, _digest: bytes) -> None:
            raise Unavailable("away")

    monkeypatch.setattr(batch_routes, "WINDOW_S", 2)
    runner = fleet.gateway._runner
    monkeypatch.setattr(runner, "_parts", replace(runner._parts, auth=Away()))
    async with fleet.openai() as client:
        batch = await ended(client, await start(client, line("a"), line("b")), "expired")
    assert batch.request_counts.failed == 2
    assert fleet.worker.requests == []


async def test_batches_wait_while_others_queue(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line begins while a replica says that requests wait."""
    runner, looks = fleet.gateway._runner, 0

    def is_busy() -> bool:
        nonlocal looks
        looks += 1
        return fleet.gateway.directory.num_waiting > 0

    monkeypatch.setattr(runner, "_parts", replace(runner._parts, is_busy=is_busy))
    fleet.router.set_waiting("w0", 3)
    await eventually(lambda: fleet.gateway.directory.num_waiting == 3)
    async with fleet.openai() as client:
        batch_id = await start(client, line("a"))
        await eventually(lambda: looks >= 3)
        assert fleet.worker.requests == []
        fleet.router.set_waiting("w0", 0)
        await ended(client, batch_id)


async def test_a_full_fleet_is_tried_again(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is refused for now waits and is answered later."""
    outcomes = tries(monkeypatch)
    fleet.worker.switches.refuse = True
    async with fleet.openai() as client:
        batch_id = await start(client, line("a"))
        await eventually(lambda: outcomes)
        fleet.worker.switches.refuse = False
        batch = await ended(client, batch_id)
        good = await results(client, batch.output_file_id)
    assert len(good) == 1
    check_paid_once(fleet, good)


async def test_a_model_that_a_starting_worker_may_serve_is_waited_for(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all have said what they serve, it is unknown."""
    outcomes = tries(monkeypatch)
    fleet.router.has_undescribed_models = True
    fleet.router.set_waiting("w0", 0)
    await eventually(lambda: fleet.gateway.directory.is_starting)
    async with fleet.openai() as client:
        batch_id = await start(client, line("a"), line("b", model="later"))
        await eventually(lambda: any(it.status == 404 for it in outcomes))
        fleet.router.has_undescribed_models = False
        await fleet.add_worker(FakeWorker(worker_id="w1", model="later"))
        batch = await ended(client, batch_id)
        assert batch.request_counts.completed == 2
        batch = await ended(client, await start(client, line("c", model="never")))
        assert batch.request_counts.failed == 1


async def test_a_line_that_can_never_be_answered_is_closed_once(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries fail until the batch's time is over: one request in the books, opened and closed."""
    monkeypatch.setattr(batch_routes, "WINDOW_S", 4)
    fleet.worker.switches.refuse = True
    async with fleet.openai() as client:
        batch = await ended(client, await start(client, line("a")), "expired")
    assert batch.request_counts.failed == 1
    kinds = [it.kind for it in fleet.usage.events]
    assert kinds == [usage_pb2.UsageEvent.KIND_OPENED, usage_pb2.UsageEvent.KIND_CLOSED]
    await fleet.settled()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/nope"}, "endpoint"),
        ({"input_file_id": "file-nope"}, "input_file_id"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"extra_body": {"no_such": 1}}, "no_such"),
    ],
)
async def test_wrong_batches_are_refused(fleet: GatewayFleet, fields: Any, param: str) -> None:
    """By the name of the field."""
    async with fleet.openai() as client:
        file_id = await upload(client, line("a"))
        ask = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h", **fields}
        with pytest.raises(openai.APIStatusError) as caught:
            await client.batches.create(**ask)
    assert caught.value.param == param


async def test_wrong_files_are_refused(fleet_parts: GatewayFleet) -> None:
    """Purpose, unknown fields, size."""
    fleet_parts.settings["file_max_bytes"] = 1024
    await fleet_parts.start()
    async with fleet_parts.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.create(file=("a", b"x"), purpose="fine-tune")
        assert caught.value.param == "purpose"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.create(file=("a", b"x" * 5000), purpose="batch")
        assert "1024" in str(caught.value)
        with pytest.raises(openai.APIStatusError) as too_large:
            await client.files.create(file=("a", b"x" * 200_000), purpose="batch")
        assert too_large.value.status_code == 413
        assert [one async for one in client.files.list()] == []
    await fleet_parts.close()


async def test_results_find_room_whatever_the_bounds(fleet_parts: GatewayFleet) -> None:
    """A batch ends though its results are larger than a file, and the project's room, may be."""
    fleet_parts.settings |= {"file_max_bytes": 1024, "project_file_bytes": 1500}
    await fleet_parts.start()
    async with fleet_parts.openai() as client:
        batch = await ended(client, await start(client, *[line(str(idx)) for idx in range(5)]))
        assert len(await results(client, batch.output_file_id)) == 5
        with pytest.raises(openai.BadRequestError):
            await upload(client, line("no room"))
    await fleet_parts.close()


async def test_one_tenants_batches_hold_up_no_other(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by their number, and not by lines that wait to be tried again."""
    other, _ = fleet.new_key(tenant_id="rival")
    really, refused = LineCaller.call, []

    async def call(self: LineCaller, principal: Principal, *rest: Any) -> LineOutcome:
        if principal.tenant_id == "rival":
            return await really(self, principal, *rest)
        refused.append(rest)
        return LineOutcome(429, b"{}", 30.0)

    monkeypatch.setattr(LineCaller, "call", call)
    async with fleet.openai() as client, fleet.openai(other) as rival:
        flood = [await start(client, *(line(f"{idx}") for idx in range(9))) for _ in range(6)]
        await eventually(lambda: refused)
        await ended(rival, await start(rival, line("a"), line("b")))
        for batch_id in flood:
            await client.batches.cancel(batch_id)
