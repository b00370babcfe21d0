"""/v1/files over HTTP, with the SDK that applications use."""

from __future__ import annotations

import asyncio

import openai
import pytest

from headrace_gateway.batch_api import upload_forms
from headrace_testing.gateway_fleet import GatewayFleet


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
    monkeypatch.setattr(upload_forms, "_PIECE_TIMEOUT_S", 0.2)
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


async def test_what_is_no_form_is_told_what_a_form_is(fleet: GatewayFleet) -> None:
    """Not that the purpose, which it names, is wrong."""
    asked = {"purpose": "batch", "file": "x"}
    async with fleet.http() as client:
        answers = [
            await client.post("/v1/files", json=asked),
            await client.post("/v1/files", content=b"x", headers={"content-type": "text/plain"}),
        ]
    for answer in answers:
        assert answer.status_code == 400
        assert "multipart/form-data" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/uploads", "/v1/batches"])
async def test_a_compressed_body_is_told_so(fleet: GatewayFleet, path: str) -> None:
    """Here as on the endpoints that use a model."""
    async with fleet.http() as client:
        told = {"content-encoding": "gzip", "content-type": "multipart/form-data; boundary=x"}
        answer = await client.post(path, content=b"\x1f\x8b", headers=told)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
