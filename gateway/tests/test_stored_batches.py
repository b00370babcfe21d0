"""Files and batches as the state keeps them, without a gateway around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from headrace_common.errors import InvalidRequest, NotFound
from headrace_gateway.answer_extras import Json
from headrace_gateway.batch_api.input_lines import InputLine
from headrace_gateway.batch_api.stored_batches import Batch, StoredBatches
from headrace_gateway.batch_api.stored_files import FileLimits, StoredFiles
from headrace_gateway.pages import rows_from
from headrace_gateway.state import schema
from headrace_gateway.state.store import Owner, StateStore
from headrace_testing.clock import FakeClock


async def listed(stored: StoredFiles, owner: Owner) -> list[str]:
    found = await stored.find_page(owner, None, 100, None, is_newest_first=False)
    return [it["id"] for it in found["data"]]


async def test_a_file_that_is_refused_leaves_nothing(tmp_path: Path, clock: FakeClock) -> None:
    """It is not written first; one that is being written has its room."""
    state, owner = StateStore(f"sqlite:///{tmp_path / 's.sqlite3'}", clock), Owner("t", "p")
    stored = StoredFiles(state, FileLimits(max_bytes=1000, project_bytes=1500, ttl_s=60))

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        with pytest.raises(InvalidRequest, match="500 bytes"):
            await stored.save(owner, "late", "b", "batch", nothing(), None, 501)
        await stored.save(owner, "small", "b", "batch", nothing(), None, 500)

    async def nothing() -> AsyncIterator[bytes]:
        yield b"x" * 500

    with pytest.raises(InvalidRequest, match="1000 bytes"):
        await stored.save(owner, "large", "a", "batch", nothing(), None, 1001)
    await stored.save(owner, "first", "a", "batch", pieces(), None, 1000)
    assert await listed(stored, owner) == ["first", "small"]
    kept = await state.read(lambda it: set(it.scalars(select(schema.file_chunks.c.file_id))))
    assert kept == {"first", "small"}
    await state.close()


async def test_batches_that_fail_let_others_pass(tmp_path: Path, clock: FakeClock) -> None:
    """Whoever is let go unfinished waits behind those that wait already."""
    state, owner = StateStore(f"sqlite:///{tmp_path / 's.sqlite3'}", clock), Owner("t", "p")
    stored = StoredBatches(state, ttl_s=60)

    async def claimed(num: int) -> list[str]:
        found: list[Batch] = []
        for _ in range(num):
            batch = await stored.claim("w", {it.batch_id: "t" for it in found})
            assert batch is not None
            found.append(batch)
        clock.advance(1.0)
        for batch in found:
            await stored.release(batch.batch_id, "w")
        return [it.batch_id for it in found]

    for batch_id in ("b1", "b2", "b3"):
        await stored.add(owner, "key_1", {"id": batch_id}, state.now_s() + 3600)
    assert await claimed(2) == ["b1", "b2"]
    assert await claimed(2) == ["b3", "b1"]
    assert await claimed(1) == ["b2"]
    await state.close()


async def test_tenants_have_turns_of_batches(tmp_path: Path, clock: FakeClock) -> None:
    """Whoever has none under way comes first, however many of another's wait for longer."""
    state = StateStore(f"sqlite:///{tmp_path / 's.sqlite3'}", clock)
    stored = StoredBatches(state, ttl_s=60)
    for tenant_id, batch_id in (("a", "b1"), ("a", "b2"), ("a", "b3"), ("b", "b4")):
        await stored.add(
            Owner(tenant_id, "p"), "key_1", {"id": batch_id}, deadline_s=state.now_s() + 3600
        )
    busy: dict[str, str] = {}
    for expected in ("b1", "b4", "b2"):
        batch = await stored.claim("w", busy)
        assert batch is not None
        assert batch.batch_id == expected
        busy[batch.batch_id] = batch.owner.tenant_id
    assert await stored.claim("w", busy, of_others=True) is None
    await state.close()


async def test_a_page_reads_no_more_than_it_shows(tmp_path: Path, clock: FakeClock) -> None:
    """Whichever way it goes, files of a purpose or all, and batches; each list ends."""
    state, owner = StateStore(f"sqlite:///{tmp_path / 's.sqlite3'}", clock), Owner("t", "p")
    stored = StoredFiles(state, FileLimits(max_bytes=1000, project_bytes=1500, ttl_s=60))
    made = StoredBatches(state, ttl_s=60)

    async def nothing() -> AsyncIterator[bytes]:
        yield b"x"

    for idx in range(7):
        purpose = "batch" if idx % 2 else "batch_output"
        await stored.save(owner, f"f{idx}", "a", purpose, nothing())
        await made.add(owner, "key_1", {"id": f"b{idx}"}, state.now_s() + 3600)
    await stored.save(Owner("t", "other"), "f3x", "a", "batch", nothing())

    async def turned(find: Callable[[str | None], Awaitable[Json]]) -> list[str]:
        """Turn the pages from the first to the last."""
        ids: list[str] = []
        while True:
            shown = await find(ids[-1] if ids else None)
            assert len(shown["data"]) <= 2
            ids += [it["id"] for it in shown["data"]]
            assert shown["last_id"] == ids[-1]
            if not shown["has_more"]:
                return ids

    def files(purpose: str | None, *, newest: bool) -> Callable[[str | None], Awaitable[Json]]:
        return lambda after: stored.find_page(owner, purpose, 2, after, is_newest_first=newest)

    assert await turned(files(None, newest=False)) == [f"f{idx}" for idx in range(7)]
    assert await turned(files(None, newest=True)) == [f"f{6 - idx}" for idx in range(7)]
    assert await turned(files("batch", newest=True)) == ["f5", "f3", "f1"]
    assert await turned(lambda after: made.find_page(owner, 2, after)) == [
        f"b{6 - idx}" for idx in range(7)
    ]
    for after, purpose in (("f3x", None), ("f0", "batch"), ("", None)):
        with pytest.raises(NotFound):
            await stored.find_page(owner, purpose, 2, after, is_newest_first=True)
    table, key = schema.files, schema.files.c.file_id
    rows = await state.read(
        lambda it: rows_from(it, select(table), key, 2, "f5", is_descending=True)
    )
    assert [row["file_id"] for row in rows] == ["f4", "f3x", "f3"]
    await state.close()


async def test_a_line_that_has_a_result_is_not_dropped(tmp_path: Path, clock: FakeClock) -> None:
    """Whatever is told of the others, all at once: a line ends once."""
    state, owner = StateStore(f"sqlite:///{tmp_path / 's.sqlite3'}", clock), Owner("t", "p")
    stored = StoredBatches(state, ttl_s=60)
    lines = [InputLine(number, f"l{number}", b"{}") for number in (1, 2, 3)]
    await stored.add(owner, "key_1", {"id": "b"}, state.now_s() + 3600, lines)
    await stored.end_line("b", 2, b"answer", succeeded=True)
    await stored.drop_lines("b", [(number, b"dropped") for number in (1, 2, 3)])
    assert [pages async for pages in stored.each_result("b")] == [
        [b"dropped", b"answer", b"dropped"]
    ]
    assert await stored.pending("b", 0, 10) == []
    counts = (await stored.find(owner, "b"))["request_counts"]
    assert counts == {"total": 3, "completed": 1, "failed": 2}
    await state.close()
