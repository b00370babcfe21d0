"""/v1/uploads over HTTP, with the SDK that applications use."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import func, select

from headrace_common.errors import InvalidRequest
from headrace_gateway.batch_api import stored_uploads, upload_routes
from headrace_gateway.batch_api.stored_files import FileLimits, StoredFiles
from headrace_gateway.batch_api.stored_uploads import TTL_S, StoredUploads
from headrace_gateway.state import schema
from headrace_gateway.state.store import Owner, StateStore
from headrace_testing.batches import URL, ended, jsonl, line, results
from headrace_testing.clock import FakeClock
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually

ASKED: dict[str, Any] = {
    "filename": "in.jsonl",
    "mime_type": "application/jsonl",
    "purpose": "batch",
}


async def begin(client: openai.AsyncOpenAI, size_bytes: int, **fields: Any) -> str:
    """Begin an upload; return its id."""
    made = await client.uploads.create(bytes=size_bytes, **{**ASKED, **fields})
    assert (made.status, made.file, made.bytes) == ("pending", None, size_bytes)
    assert made.expires_at - made.created_at == TTL_S
    return made.id


async def add(client: openai.AsyncOpenAI, upload_id: str, data: bytes) -> str:
    """Add a part; return its id."""
    part = await client.uploads.parts.create(upload_id, data=data)
    assert (part.object, part.upload_id) == ("upload.part", upload_id)
    return part.id


async def test_the_sdk_uploads_a_file_in_chunks_and_runs_it(
    fleet: GatewayFleet, tmp_path: Path
) -> None:
    """Parts smaller than a line, and larger than a stored piece; the batch reads one file."""
    lines = [json.dumps(line(f"l{idx}")) + " " * 300_000 for idx in range(8)]
    content = jsonl(*lines)
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    async with fleet.openai() as client:
        done = await client.uploads.upload_file_chunked(
            file=path,
            mime_type="application/jsonl",
            purpose="batch",
            part_size=1_100_000,
            md5=hashlib.md5(content, usedforsecurity=False).hexdigest(),
        )
        assert done.status == "completed"
        assert done.file is not None
        assert (done.file.bytes, done.file.filename) == (len(content), "in.jsonl")
        assert (await client.files.content(done.file.id)).content == content
        assert [one.id async for one in client.files.list()] == [done.file.id]
        batch = await client.batches.create(
            input_file_id=done.file.id, endpoint=URL, completion_window="24h"
        )
        batch = await ended(client, batch.id)
        assert len(await results(client, batch.output_file_id or "")) == 8


async def test_parts_come_in_any_order_and_stand_as_they_are_named(fleet: GatewayFleet) -> None:
    """One that was sent twice is named once; completed twice, it is one file."""
    async with fleet.openai() as client:
        upload_id = await begin(client, 6)
        texts = (b"ef", b"ab", b"cd", b"cd")
        last, first, second, _ = await asyncio.gather(
            *(add(client, upload_id, text) for text in texts)
        )
        order = [first, second, last]
        both = await asyncio.gather(
            *(client.uploads.complete(upload_id, part_ids=order) for _ in range(2))
        )
        again = await client.uploads.complete(upload_id, part_ids=order)
        files = [one async for one in client.files.list()]
        assert {it.file.id for it in (*both, again) if it.file} == {files[0].id}
        assert len(files) == 1
        assert (await client.files.content(files[0].id)).content == b"abcdef"
        with pytest.raises(openai.BadRequestError, match="completed"):
            await client.uploads.cancel(upload_id)
        with pytest.raises(openai.BadRequestError, match="completed"):
            await add(client, upload_id, b"more")


async def test_a_cancelled_upload_takes_no_part_and_no_room(fleet_parts: GatewayFleet) -> None:
    """Cancelled twice, nothing is wrong; what it held is free for others at once."""
    fleet_parts.settings |= {"file_max_bytes": 100_000, "project_file_bytes": 150_000}
    await fleet_parts.start()
    async with fleet_parts.openai() as client:
        upload_id = await begin(client, 90_000)
        part_id = await add(client, upload_id, b"x" * 90_000)
        other = await begin(client, 90_000)
        with pytest.raises(openai.BadRequestError, match="60000 bytes"):
            await add(client, other, b"x" * 90_000)
        for _ in range(2):
            assert (await client.uploads.cancel(upload_id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await add(client, upload_id, b"y")
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.uploads.complete(upload_id, part_ids=[part_id])
        part_id = await add(client, other, b"x" * 90_000)
        done = await client.uploads.complete(other, part_ids=[part_id])
        assert [one.id async for one in client.files.list()] == [done.file and done.file.id]
        # A completed one's parts take none either.
        await client.files.create(file=("a", b"x" * 50_000), purpose="batch")
    await fleet_parts.close()


async def test_what_was_not_announced_is_no_file(fleet: GatewayFleet) -> None:
    """Parts of others, too few, twice the same, another md5; then it can still be completed."""
    async with fleet.openai() as client:
        upload_id, other = await begin(client, 4), await begin(client, 2)
        one, two = [await add(client, upload_id, text) for text in (b"ab", b"cd")]
        foreign = await add(client, other, b"cd")
        for part_ids, param in (
            ([one], "part_ids"),
            ([one, one], "part_ids[1]"),
            ([one, foreign], "part_ids[1]"),
            (["part_none"], "part_ids[0]"),
            ([], "part_ids"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.uploads.complete(upload_id, part_ids=part_ids)
            assert caught.value.param == param
        for md5 in ("0" * 32, "none"):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.uploads.complete(upload_id, part_ids=[one, two], md5=md5)
            assert caught.value.param == "md5"
        assert [it async for it in client.files.list()] == []
        done = await client.uploads.complete(upload_id, part_ids=[two, one])
        assert done.file is not None
        assert (await client.files.content(done.file.id)).content == b"cdab"


async def test_uploads_are_their_projects_alone(fleet: GatewayFleet) -> None:
    """Nobody else adds to, completes or cancels one; parts are no files."""
    other, _ = fleet.new_key(tenant_id="rival")
    async with fleet.openai() as client, fleet.openai(other) as rival:
        upload_id = await begin(client, 2)
        part_id = await add(client, upload_id, b"ab")
        with pytest.raises(openai.NotFoundError):
            await add(rival, upload_id, b"ab")
        with pytest.raises(openai.NotFoundError):
            await rival.uploads.complete(upload_id, part_ids=[part_id])
        with pytest.raises(openai.NotFoundError):
            await rival.uploads.cancel(upload_id)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(part_id)
        assert [one async for one in client.files.list()] == []
        assert (await client.uploads.complete(upload_id, part_ids=[part_id])).status == "completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bytes": 0}, "bytes"),
        ({"bytes": 2**30}, "bytes"),
        ({"purpose": "assistants"}, "purpose"),
        ({"filename": ""}, "filename"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
        ({"extra_body": {"no_such": 1}}, "no_such"),
    ],
)
async def test_wrong_uploads_are_refused(fleet: GatewayFleet, fields: Any, param: str) -> None:
    """By the name of the field."""
    async with fleet.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.uploads.create(**{"bytes": 9, **ASKED, **fields})
    assert caught.value.param == param


async def test_another_method_is_told_the_right_one(fleet: GatewayFleet) -> None:
    """Of a path that takes POST alone, and of those below it."""
    async with fleet.http() as http:
        for path in ("/v1/uploads", "/v1/uploads/upload_1/complete"):
            answer = await http.get(path)
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_wrong_parts_are_refused(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty, too large, too many, with unknown fields, or none at all."""
    monkeypatch.setattr(upload_routes, "MAX_PART_BYTES", 1000)
    monkeypatch.setattr(stored_uploads, "MAX_PARTS", 1)
    async with fleet.openai() as client, fleet.http() as http:
        upload_id = await begin(client, 2)
        with pytest.raises(openai.BadRequestError, match="empty"):
            await add(client, upload_id, b"")
        with pytest.raises(openai.APIStatusError, match="1000 bytes") as caught:
            await add(client, upload_id, b"x" * 100_000)
        assert caught.value.status_code == 413
        path = f"/v1/uploads/{upload_id}/parts"
        data = {"data": ("a", b"ab")}
        wrong = await http.post(path, data={"no_such": "1"}, files=data)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "no_such")
        wrong = await http.post(path, data={"data": "text"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "data")
        await add(client, upload_id, b"ab")
        with pytest.raises(openai.BadRequestError, match="1 parts"):
            await add(client, upload_id, b"ab")


async def test_a_project_has_so_many_uploads_pending(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is told to wait until one is over."""
    monkeypatch.setattr(stored_uploads, "MAX_PENDING", 1)
    async with fleet.openai() as client:
        upload_id = await begin(client, 2)
        with pytest.raises(openai.RateLimitError):
            await begin(client, 2)
        await client.uploads.cancel(upload_id)
        await begin(client, 2)


async def test_an_upload_expires_with_its_parts(tmp_path: Path, clock: FakeClock) -> None:
    """After an hour nothing of it is left; what was completed stays, its parts do not."""
    state, owner = StateStore(f"sqlite:///{tmp_path / 's.sqlite3'}", clock), Owner("t", "p")
    files = StoredFiles(state, FileLimits(max_bytes=1000, project_bytes=1500, ttl_s=10**6))
    uploads = StoredUploads(state, files)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"abc"

    async def counts() -> list[int]:
        await state.sweep()
        asked = [select(func.count()).select_from(it) for it in (schema.files, schema.file_chunks)]
        return await state.read(lambda it: [it.execute(one).scalar_one() for one in asked])

    for name in ("left", "done"):
        now_s = state.now_s()
        body = {"id": name, "bytes": 3, "filename": "a", "purpose": "batch", "ttl_s": None}
        await uploads.add(owner, {**body, "expires_at": now_s + TTL_S})
    for name in ("left", "done", "done"):
        part_id = await uploads.add_part(owner, name, pieces(), 3)
    # What is refused leaves nothing behind, however often it is asked for.
    with pytest.raises(InvalidRequest, match="md5"):
        await uploads.complete(owner, "done", [part_id], "0" * 32)
    assert await counts() == [3, 3]
    await uploads.complete(owner, "done", [part_id], None)
    assert await counts() == [3, 3]
    clock.advance(90)
    assert await counts() == [2, 2]
    clock.advance(TTL_S)
    assert await counts() == [1, 1]
    assert await state.read(lambda it: it.execute(select(schema.uploads)).all()) == []
    await state.close()


async def test_uploads_and_message_batches_are_kept_in_postgresql(
    postgres_url: str, fleet_parts: GatewayFleet
) -> None:
    """The same statements run there: locks, pages, sweeps."""
    fleet_parts.settings["state_url"] = postgres_url
    await fleet_parts.start()
    async with fleet_parts.openai() as client, fleet_parts.anthropic() as other:
        upload_id = await begin(client, 4)
        part_ids = [await add(client, upload_id, text) for text in (b"ab", b"cd")]
        done = await client.uploads.complete(upload_id, part_ids=part_ids)
        assert done.file is not None
        assert (await client.files.content(done.file.id)).content == b"abcd"
        cancelled = await begin(client, 4)
        assert (await client.uploads.cancel(cancelled)).status == "cancelled"
        batches = other.messages.batches
        params: Any = {"model": MODEL, "max_tokens": 4, "messages": line("a")["body"]["messages"]}
        made = [
            (await batches.create(requests=[{"custom_id": "a", "params": params}])).id
            for _ in range(3)
        ]
        assert [one.id async for one in batches.list(limit=1)] == made[::-1]
        assert [one.id async for one in batches.list(before_id=made[0], limit=1)] == made[1:]

        async def has_ended() -> bool:
            return (await batches.retrieve(made[0])).processing_status == "ended"

        await eventually(has_ended, within_s=20, every_s=0.1)
        kinds = [one.result.type async for one in await batches.results(made[0])]
        assert kinds == ["succeeded"]
        fleet_parts.worker.switches.refuse = True
        requests: Any = [{"custom_id": f"r{idx}", "params": params} for idx in range(150)]
        made.append((await batches.create(requests=requests)).id)
        await batches.cancel(made[3])

        async def is_cancelled() -> bool:
            return (await batches.retrieve(made[3])).request_counts.canceled == 150

        await eventually(is_cancelled, within_s=20, every_s=0.1)
        await batches.delete(made[0])
        assert [one.id async for one in batches.list()] == made[:0:-1]
    await fleet_parts.close()
