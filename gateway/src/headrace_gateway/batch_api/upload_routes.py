"""/v1/uploads: a file in parts; create, add a part, complete, cancel."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import orjson
from fastapi import APIRouter, Request
from msgspec import Meta

from headrace_common.errors import InvalidRequest
from headrace_common.ids import ulid
from headrace_gateway.answer_extras import Json
from headrace_gateway.auth import KeyAuth
from headrace_gateway.batch_api.stored_uploads import MAX_PARTS, TTL_S, StoredUploads
from headrace_gateway.batch_api.upload_forms import (
    FileExpiry,
    file_of,
    pieces_of,
    read_form,
    read_json,
)
from headrace_gateway.call_rate import CallRate
from headrace_gateway.json_body import decode
from headrace_gateway.openai_bodies import Text
from headrace_gateway.state.owner_of import owner_of
from headrace_gateway.state.store import Owner
from headrace_gateway.visit import Caller

# As OpenAI has it, and what its SDK sends at once.
MAX_PART_BYTES = 64 * 2**20
# Kept with an upload for its file.
_HIDDEN = ("ttl_s",)


class UploadBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/uploads."""

    bytes: Annotated[int, Meta(ge=1)]
    filename: Annotated[str, Meta(min_length=1, max_length=255)]
    # Files of requests are JSON lines, whatever they are called.
    mime_type: Text
    purpose: Literal["batch"]
    expires_after: FileExpiry | None = None


class CompleteBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/uploads/{upload_id}/complete."""

    part_ids: Annotated[list[str], Meta(min_length=1, max_length=MAX_PARTS)]
    md5: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{32}(?!\s)$")] | None = None


_DECODER = msgspec.json.Decoder(UploadBody)
_COMPLETE_DECODER = msgspec.json.Decoder(CompleteBody)
# As OpenAPI describes them.
_PART = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["data"],
                    "additionalProperties": False,
                    "properties": {"data": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}
_COMPLETE = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CompleteBody"}}},
    }
}


class UploadCreation:
    """Makes uploads; called by the route of POST /v1/uploads.

    Args:
        uploads: where they are kept.
        max_bytes: of one file.
        rate: bounds how often a tenant asks.
    """

    def __init__(self, uploads: StoredUploads, max_bytes: int, rate: CallRate) -> None:
        self._uploads, self._max_bytes, self._rate = uploads, max_bytes, rate

    async def __call__(self, caller: Caller, body: bytes) -> bytes:
        """Add an upload; return its object."""
        self._rate.count(caller.principal.tenant_id)
        asked = decode(_DECODER, body)
        if asked.bytes > self._max_bytes:
            raise InvalidRequest(f"A file may have at most {self._max_bytes} bytes.", param="bytes")
        now_s, owner = self._uploads.now_s(), Owner.of(caller.principal)
        made: Json = {
            "id": "upload_" + ulid(self._uploads.clock),
            "object": "upload",
            "bytes": asked.bytes,
            "created_at": now_s,
            "expires_at": now_s + TTL_S,
            "filename": asked.filename,
            "purpose": asked.purpose,
            "file": None,
            "ttl_s": asked.expires_after and asked.expires_after.seconds,
        }
        await self._uploads.add(owner, made)
        return orjson.dumps(_shown(await self._uploads.find(owner, made["id"])))


def uploads_router(auth: KeyAuth, uploads: StoredUploads, max_bytes: int) -> APIRouter:
    """Return the routes, but for the one that makes an upload."""
    router = APIRouter(tags=["uploads"], prefix="/v1/uploads/{upload_id}")

    @router.post("/parts", openapi_extra=_PART)
    async def add_part(upload_id: str, request: Request) -> Json:
        """Add a part (multipart/form-data: data), of at most 64 MiB."""
        owner = await owner_of(auth, request)
        async with read_form(request, ("data",), min(max_bytes, MAX_PART_BYTES)) as form:
            file = file_of(form, "data")
            if not file.size:
                raise InvalidRequest("A part must not be empty.", param="data")
            part_id = await uploads.add_part(owner, upload_id, pieces_of(file), file.size)
        return {
            "id": part_id,
            "object": "upload.part",
            "created_at": uploads.now_s(),
            "upload_id": upload_id,
        }

    @router.post("/complete", openapi_extra=_COMPLETE)
    async def complete(upload_id: str, request: Request) -> Json:
        """Make a file of the named parts, in their order."""
        owner = await owner_of(auth, request)
        asked = await read_json(request, _COMPLETE_DECODER)
        return _shown(await uploads.complete(owner, upload_id, asked.part_ids, asked.md5))

    @router.post("/cancel")
    async def cancel(upload_id: str, request: Request) -> Json:
        """Let an upload go; no part may be added any more."""
        return _shown(await uploads.cancel(await owner_of(auth, request), upload_id))

    return router


def _shown(upload: Json) -> Json:
    return {name: value for name, value in upload.items() if name not in _HIDDEN}
