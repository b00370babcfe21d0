"""What a batch is made of: its body and the lines of its file."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from headrace_gateway.batch_api import stored_files
from headrace_gateway.batch_api.input_lines import MAX_LINE_BYTES
from headrace_gateway.batch_api.stored_files import StoredFiles
from headrace_gateway.state.store import Owner
from headrace_testing.batches import (
    URL,
    ended,
    line,
    start,
    upload,
)
from headrace_testing.gateway_fleet import GatewayFleet


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


async def test_results_are_no_input(fleet: GatewayFleet) -> None:
    """The file that a batch made has another purpose, and is refused at once."""
    async with fleet.openai() as client:
        batch = await ended(client, await start(client, line("a")))
        with pytest.raises(openai.BadRequestError) as caught:
            await client.batches.create(
                input_file_id=batch.output_file_id, endpoint=URL, completion_window="24h"
            )
    assert caught.value.param == "input_file_id"


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
