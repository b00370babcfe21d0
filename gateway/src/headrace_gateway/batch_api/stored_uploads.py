"""Uploads: files that come in parts, in any order and over several connections.

A part is a file that nobody sees, named after its upload; it takes room like any other. In the
moment in which an upload is completed its parts become one file: their pieces change their owner,
nothing is copied. What is left over is swept.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence

import orjson
from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from headrace_common.clock import Clock
from headrace_common.errors import InvalidRequest, NotFound, RateLimited
from headrace_common.ids import ulid
from headrace_gateway.answer_extras import Json
from headrace_gateway.batch_api.stored_files import StoredFiles, file_json, join
from headrace_gateway.state.schema import files, uploads
from headrace_gateway.state.store import Owner, StateStore

# As OpenAI has it.
TTL_S = 3600
# Of one project, at a time.
MAX_PENDING = 100
MAX_PARTS = 1000
_PART = "upload_part"
# Parts of no more use are kept so long: one may still be being written.
_LEFT_S = 60
_PENDING, _COMPLETED, _CANCELLED = "pending", "completed", "cancelled"


class StoredUploads:
    """The uploads of all projects.

    Args:
        state: where they are.
        stored: their files and parts.
    """

    def __init__(self, state: StateStore, stored: StoredFiles) -> None:
        self._state, self._files = state, stored

    @property
    def clock(self) -> Clock:
        """For ids."""
        return self._state.clock

    def now_s(self) -> int:
        """Return the time of records."""
        return self._state.now_s()

    async def add(self, owner: Owner, body: Json) -> None:
        """Add an upload that waits for its parts.

        Raises:
            RateLimited: the project has as many of them as it may.
        """
        row = {
            "upload_id": body["id"],
            "tenant_id": owner.tenant_id,
            "project_id": owner.project_id,
            "status": _PENDING,
            "body": orjson.dumps(body),
            "expires_s": body["expires_at"],
        }
        is_pending = (*_owned(owner), uploads.c.status == _PENDING)
        count = select(func.count()).select_from(uploads).where(*is_pending)

        def work(connection: Connection) -> None:
            if connection.execute(count).scalar_one() >= MAX_PENDING:
                raise RateLimited(
                    f"At most {MAX_PENDING} uploads of a project may be pending.",
                    retry_after_s=60.0,
                )
            connection.execute(insert(uploads), row)

        await self._state.write(work, owner.tenant_id)

    async def find(self, owner: Owner, upload_id: str) -> Json:
        """Return an upload's object.

        Raises:
            NotFound: there is none of this owner's, or its time is over.
        """
        where = (*_owned(owner), *self._is(upload_id))
        asked = select(uploads.c.body, uploads.c.status).where(*where)
        row = await self._state.read(lambda it: it.execute(asked).first(), owner.tenant_id)
        if row is None:
            raise NotFound(
                f"Upload {upload_id[:100]!r} not found; it may have expired.", param="upload_id"
            )
        return {**orjson.loads(row[0]), "status": row[1]}

    async def add_part(
        self, owner: Owner, upload_id: str, pieces: AsyncIterator[bytes], size_bytes: int
    ) -> str:
        """Keep a part; return its id.

        Raises:
            InvalidRequest: the upload is over or has too many parts, or there is no room.
            NotFound: there is no such upload.
        """
        upload = await self.find(owner, upload_id)
        if upload["status"] != _PENDING:
            raise _over(upload)
        asked = select(func.count()).select_from(files).where(*_parts(owner, upload_id))
        if await self._state.read(lambda it: it.execute(asked).scalar_one()) >= MAX_PARTS:
            raise InvalidRequest(f"An upload may have at most {MAX_PARTS} parts.", param="data")
        part_id = "part_" + ulid(self.clock)
        await self._files.write(owner, part_id, upload_id, _PART, pieces, size_bytes)
        return part_id

    async def complete(
        self, owner: Owner, upload_id: str, part_ids: Sequence[str], md5: str | None
    ) -> Json:
        """Make a file of parts; return the upload. Of one that is completed nothing changes.

        Raises:
            InvalidRequest: it was cancelled, or the parts are not what was announced.
            NotFound: there is no such upload.
        """
        upload = await self.find(owner, upload_id)
        if md5 is not None and upload["status"] == _PENDING:
            await self._state.read(
                lambda it: _check_parts(it, owner, upload, part_ids), owner.tenant_id
            )
            await self._check_md5(owner, part_ids, md5)
        now_s = self.now_s()
        row = {
            "file_id": self._files.new_id(),
            "tenant_id": owner.tenant_id,
            "project_id": owner.project_id,
            "filename": upload["filename"],
            "purpose": upload["purpose"],
            "size_bytes": upload["bytes"],
            "created_s": now_s,
            "expires_s": self._files.end_s(now_s, upload["ttl_s"]),
        }
        done = {"body": orjson.dumps({**upload, "file": file_json(row)}), "status": _COMPLETED}

        def work(connection: Connection) -> None:
            if self._end(connection, owner, upload_id, done):
                _check_parts(connection, owner, upload, part_ids)
                join(connection, row, part_ids)
                self._let_go(connection, owner, upload_id)

        await self._state.write(work, owner.tenant_id)
        upload = await self.find(owner, upload_id)
        if upload["status"] != _COMPLETED:
            raise _over(upload)
        return upload

    async def cancel(self, owner: Owner, upload_id: str) -> Json:
        """Let an upload go; return it. Of one that is cancelled nothing changes.

        Raises:
            InvalidRequest: it is completed.
            NotFound: there is no such upload.
        """

        def work(connection: Connection) -> None:
            if self._end(connection, owner, upload_id, {"status": _CANCELLED}):
                self._let_go(connection, owner, upload_id)

        await self._state.write(work, owner.tenant_id)
        upload = await self.find(owner, upload_id)
        if upload["status"] == _COMPLETED:
            raise InvalidRequest("A completed upload cannot be cancelled; delete its file.")
        return upload

    async def _check_md5(self, owner: Owner, part_ids: Sequence[str], md5: str) -> None:
        digest = hashlib.md5(usedforsecurity=False)
        for part_id in part_ids:
            async for piece in self._files.read(owner, part_id):
                digest.update(piece)
        if digest.hexdigest() != md5.lower():
            raise InvalidRequest("The parts have another md5.", param="md5")

    def _end(self, connection: Connection, owner: Owner, upload_id: str, done: Json) -> bool:
        """End a pending upload; return whether it was one."""
        where = (*_owned(owner), *self._is(upload_id), uploads.c.status == _PENDING)
        return connection.execute(update(uploads).where(*where).values(done)).rowcount > 0

    def _let_go(self, connection: Connection, owner: Owner, upload_id: str) -> None:
        """Free the room of parts that are of no more use."""
        left = {"expires_s": self.now_s() + _LEFT_S, "size_bytes": -1}
        connection.execute(update(files).where(*_parts(owner, upload_id)).values(left))

    def _is(self, upload_id: str) -> tuple[ColumnElement[bool], ...]:
        return uploads.c.upload_id == upload_id, uploads.c.expires_s > self.now_s()


def _over(upload: Json) -> InvalidRequest:
    return InvalidRequest(f"The upload is {upload['status']}.", param="upload_id")


def _check_parts(
    connection: Connection, owner: Owner, upload: Json, part_ids: Sequence[str]
) -> None:
    asked = select(files.c.file_id, files.c.size_bytes).where(*_parts(owner, upload["id"]))
    # A part's size is negative, as of any file that nobody sees.
    sizes, total = {row[0]: -row[1] for row in connection.execute(asked)}, 0
    for idx, part_id in enumerate(part_ids):
        if part_id not in sizes:
            raise InvalidRequest(
                f"Part {part_id[:100]!r} is not one of this upload's, or named twice.",
                param=f"part_ids[{idx}]",
            )
        total += sizes.pop(part_id)
    if total != upload["bytes"]:
        raise InvalidRequest(
            f"The parts have {total} bytes together; {upload['bytes']} were announced.",
            param="part_ids",
        )


def _owned(owner: Owner) -> tuple[ColumnElement[bool], ...]:
    return uploads.c.tenant_id == owner.tenant_id, uploads.c.project_id == owner.project_id


def _parts(owner: Owner, upload_id: str) -> tuple[ColumnElement[bool], ...]:
    return (
        files.c.tenant_id == owner.tenant_id,
        files.c.project_id == owner.project_id,
        files.c.purpose == _PART,
        files.c.filename == upload_id,
    )
