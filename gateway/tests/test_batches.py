"""/v1/batches over HTTP: from a file to its results, and cancelled on the way."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from headrace_common.price_rows import cached_tokens
from headrace_contracts.types.v1.types_pb2 import PRIORITY_BATCH
from headrace_contracts.usage.v1 import usage_pb2
from headrace_testing.batches import (
    URL,
    ended,
    line,
    results,
    start,
    upload,
)
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually


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
