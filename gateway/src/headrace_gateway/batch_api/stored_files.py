"""Files of projects, kept in pieces in the gateway's state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, RowMapping, Select, delete, func, insert, select, update

from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.ids import ulid
from headrace_gateway.answer_extras import Json
from headrace_gateway.pages import page_of, rows_from
from headrace_gateway.state.schema import file_chunks, files
from headrace_gateway.state.store import Owner, StateStore

CHUNK_BYTES = 2**20
# How long a file may be asked to be kept.
MIN_TTL_S, MAX_TTL_S = 3600, 30 * 86_400
# A file whose upload broke off is swept so soon.
_HALF_S = 3600
# Purposes, as OpenAI names them.
REQUESTS, RESULTS = "batch", "batch_output"


@dataclass(frozen=True)
class FileLimits:
    """Bounds of files.

    Args:
        max_bytes: of one file.
        project_bytes: of all files of one project.
        ttl_s: how long a file is kept.
    """

    max_bytes: int
    project_bytes: int
    ttl_s: int


class StoredFiles:
    """The files of all projects.

    Args:
        state: where they are.
        limits: bounds.
    """

    def __init__(self, state: StateStore, limits: FileLimits) -> None:
        self._state, self.limits = state, limits

    def new_id(self) -> str:
        """Return the id of a file to be made."""
        return "file-" + ulid(self._state.clock)

    async def save(
        self,
        owner: Owner,
        file_id: str,
        filename: str,
        purpose: str,
        pieces: AsyncIterator[bytes],
        ttl_s: int | None = None,
        size_bytes: int = 0,
    ) -> Json:
        """Keep a file under an id, also if an earlier try to write it broke off.

        Args:
            owner: see `write`.
            file_id: see `write`.
            filename: see `write`.
            purpose: see `write`.
            pieces: see `write`.
            ttl_s: how long it is kept; None = as long as files are.
            size_bytes: see `write`.

        Raises:
            InvalidRequest: it is too large, or the project has no room for it.
        """
        row = await self.write(owner, file_id, filename, purpose, pieces, size_bytes)
        row["expires_s"] = self.end_s(row["created_s"], ttl_s)
        done = {name: row[name] for name in ("size_bytes", "expires_s")}
        where = files.c.file_id == file_id
        await self._state.write(
            lambda it: it.execute(update(files).where(where).values(done)), owner.tenant_id
        )
        return file_json(row)

    async def write(
        self,
        owner: Owner,
        file_id: str,
        filename: str,
        purpose: str,
        pieces: AsyncIterator[bytes],
        size_bytes: int = 0,
    ) -> Json:
        """Write a file that nobody sees, and that is swept in an hour; return its row.

        Args:
            owner: whose it is.
            file_id: the id.
            filename: as its owner calls it.
            purpose: as OpenAI names it.
            pieces: its content.
            size_bytes: what it needs room for; 0 = nothing: results are paid for, they find room.

        Raises:
            InvalidRequest: it is too large, or the project has no room for it.
        """
        now_s = self._state.now_s()
        row = {
            "file_id": file_id,
            "tenant_id": owner.tenant_id,
            "project_id": owner.project_id,
            "filename": filename,
            "purpose": purpose,
            # Negative while it is written: nobody sees it yet, its room is taken.
            "size_bytes": -max(1, size_bytes),
            "created_s": now_s,
            "expires_s": now_s + _HALF_S,
        }
        await self._state.write(
            lambda it: _begin(it, row, size_bytes, self.limits), owner.tenant_id
        )
        return {**row, "size_bytes": await self._write_chunks(owner, file_id, pieces)}

    def end_s(self, created_s: int, ttl_s: int | None) -> int:
        """Return until when a file is kept that may be so for a time; None = as long as any."""
        return created_s + min(ttl_s or self.limits.ttl_s, self.limits.ttl_s)

    async def _write_chunks(self, owner: Owner, file_id: str, pieces: AsyncIterator[bytes]) -> int:
        size_bytes, idx, waiting = 0, 0, bytearray()

        async def flush() -> None:
            nonlocal idx, waiting
            chunk = {"file_id": file_id, "chunk_idx": idx, "data": bytes(waiting)}
            await self._state.write(
                lambda it: it.execute(insert(file_chunks), chunk), owner.tenant_id
            )
            idx, waiting = idx + 1, bytearray()

        async for piece in pieces:
            size_bytes += len(piece)
            waiting += piece
            while len(waiting) >= CHUNK_BYTES:
                rest = waiting[CHUNK_BYTES:]
                del waiting[CHUNK_BYTES:]
                await flush()
                waiting = rest
        if waiting:
            await flush()
        return size_bytes

    async def find(self, owner: Owner, file_id: str, param: str = "file_id") -> Json:
        """Return a file's object.

        Raises:
            NotFound: there is none of this owner's.
        """
        row = await self._state.read(lambda it: _row(it, owner, file_id), owner.tenant_id)
        if row is None:
            raise NotFound(f"File {file_id[:100]!r} not found.", param=param)
        return file_json(row)

    async def find_page(
        self,
        owner: Owner,
        purpose: str | None,
        limit: int,
        after: str | None,
        *,
        is_newest_first: bool,
    ) -> Json:
        """Return one page of a project's files.

        Raises:
            NotFound: *after* is not in the list.
        """
        asked = select(files).where(
            files.c.tenant_id == owner.tenant_id,
            files.c.project_id == owner.project_id,
            files.c.size_bytes >= 0,
        )
        if purpose is not None:
            asked = asked.where(files.c.purpose == purpose)
        key = files.c.file_id

        def work(connection: Connection) -> Json:
            rows = rows_from(connection, asked, key, limit, after, is_descending=is_newest_first)
            return page_of([file_json(row) for row in rows], limit)

        return await self._state.read(work, owner.tenant_id)

    async def delete(self, owner: Owner, file_id: str) -> None:
        """Delete a file.

        Raises:
            NotFound: there is none of this owner's.
        """
        await self.find(owner, file_id)
        await self._state.write(lambda it: _drop(it, file_id), owner.tenant_id)

    async def read(self, owner: Owner, file_id: str) -> AsyncIterator[bytes]:
        """Yield a file's pieces; the caller has made sure whose it is."""
        idx = 0
        while True:
            where = (file_chunks.c.file_id == file_id, file_chunks.c.chunk_idx == idx)
            asked = select(file_chunks.c.data).where(*where)
            data = await self._state.read(partial(_scalar, statement=asked), owner.tenant_id)
            if data is None:
                return
            yield data
            idx += 1


def join(connection: Connection, row: Json, part_ids: Sequence[str]) -> None:
    """Make one file, which is seen, of some that nobody sees, in their order."""
    num_chunks, chunks = 0, file_chunks.c
    for part_id in part_ids:
        moved = {"file_id": row["file_id"], "chunk_idx": chunks.chunk_idx + num_chunks}
        move = update(file_chunks).where(chunks.file_id == part_id).values(moved)
        num_chunks += connection.execute(move).rowcount
    connection.execute(delete(files).where(files.c.file_id.in_(part_ids)))
    connection.execute(insert(files), row)


def file_json(row: RowMapping | Json) -> Json:
    """Return the public object of a file."""
    return {
        "id": row["file_id"],
        "object": "file",
        "bytes": row["size_bytes"],
        "created_at": row["created_s"],
        "expires_at": row["expires_s"],
        "filename": row["filename"],
        "purpose": row["purpose"],
        "status": "processed",
        "status_details": None,
    }


def _scalar(connection: Connection, statement: Select[bytes]) -> bytes | None:
    return connection.scalar(statement)


def _row(connection: Connection, owner: Owner, file_id: str) -> RowMapping | None:
    asked = select(files).where(
        files.c.file_id == file_id,
        files.c.tenant_id == owner.tenant_id,
        files.c.project_id == owner.project_id,
        files.c.size_bytes >= 0,
    )
    return connection.execute(asked).mappings().first()


def _begin(connection: Connection, row: Json, size_bytes: int, limits: FileLimits) -> None:
    """Take the room for a file.

    Raises:
        InvalidRequest: there is not so much.
    """
    _drop(connection, row["file_id"])
    used = connection.scalar(
        select(func.coalesce(func.sum(func.abs(files.c.size_bytes)), 0)).where(
            files.c.tenant_id == row["tenant_id"], files.c.project_id == row["project_id"]
        )
    )
    room = max(0, min(limits.max_bytes, limits.project_bytes - int(used or 0)))
    if size_bytes > room:
        raise InvalidRequest(
            f"The file is larger than the {room} bytes that are left for it.", param="file"
        )
    connection.execute(insert(files), row)


def _drop(connection: Connection, file_id: str) -> None:
    connection.execute(delete(file_chunks).where(file_chunks.c.file_id == file_id))
    connection.execute(delete(files).where(files.c.file_id == file_id))
