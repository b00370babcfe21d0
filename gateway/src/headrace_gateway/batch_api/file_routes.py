"""/v1/files: upload, list, retrieve, download, delete."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.datastructures import FormData
from starlette.responses import StreamingResponse

from headrace_common.errors import InvalidRequest
from headrace_gateway.answer_extras import Json
from headrace_gateway.auth import KeyAuth
from headrace_gateway.batch_api.stored_files import MAX_TTL_S, MIN_TTL_S, REQUESTS, StoredFiles
from headrace_gateway.batch_api.upload_forms import file_of, pieces_of, read_form
from headrace_gateway.state.owner_of import owner_of

_FIELDS = ("purpose", "file", "expires_after[anchor]", "expires_after[seconds]")

# As OpenAPI describes it.
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "additionalProperties": False,
                    "properties": {
                        "purpose": {"const": REQUESTS},
                        "file": {"type": "string", "format": "binary"},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": MIN_TTL_S,
                            "maximum": MAX_TTL_S,
                        },
                    },
                }
            }
        },
    }
}


def files_router(auth: KeyAuth, stored: StoredFiles) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["files"], prefix="/v1/files")

    @router.post("", openapi_extra=_UPLOAD)
    async def upload(request: Request) -> Json:
        """Keep a file of requests for a batch (multipart/form-data: purpose, file)."""
        owner = await owner_of(auth, request)
        async with read_form(request, _FIELDS, stored.limits.max_bytes) as form:
            if form.get("purpose") != REQUESTS:
                raise InvalidRequest(f"purpose must be {REQUESTS!r}.", param="purpose")
            file, ttl_s = file_of(form, "file"), _ttl_s(form)
            name, pieces, size_bytes = (
                (file.filename or "file")[:255],
                pieces_of(file),
                file.size or 0,
            )
            return await stored.save(
                owner, stored.new_id(), name, REQUESTS, pieces, ttl_s, size_bytes
            )

    @router.get("")
    async def list_files(
        request: Request,
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Json:
        """List the project's files."""
        owner = await owner_of(auth, request)
        return await stored.find_page(owner, purpose, limit, after, is_newest_first=order == "desc")

    @router.get("/{file_id}")
    async def retrieve(file_id: str, request: Request) -> Json:
        """Describe a file."""
        return await stored.find(await owner_of(auth, request), file_id)

    @router.get(
        "/{file_id}/content",
        response_class=StreamingResponse,
        responses={200: {"content": {"application/jsonl": {}}}},
    )
    async def content(file_id: str, request: Request) -> StreamingResponse:
        """Download a file."""
        owner = await owner_of(auth, request)
        found = await stored.find(owner, file_id)
        # Who gets less knows that the file went meanwhile.
        size = {"content-length": str(found["bytes"])}
        pieces = stored.read(owner, file_id)
        return StreamingResponse(pieces, media_type="application/jsonl", headers=size)

    @router.delete("/{file_id}")
    async def delete(file_id: str, request: Request) -> Json:
        """Delete a file."""
        await stored.delete(await owner_of(auth, request), file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return router


def _ttl_s(form: FormData) -> int | None:
    anchor, given = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and given is None:
        return None
    text = str(given)
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    if anchor != "created_at" or not is_number or not MIN_TTL_S <= int(text) <= MAX_TTL_S:
        raise InvalidRequest(
            f"expires_after takes the anchor created_at and {MIN_TTL_S} to {MAX_TTL_S} seconds.",
            param="expires_after",
        )
    return int(text)
