"""Multipart forms with one file, and small JSON bodies of FastAPI's routes: read within bounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import Request
from msgspec import Meta
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from headrace_common.errors import ClientGone, InvalidRequest
from headrace_gateway.batch_api.stored_files import CHUNK_BYTES, MAX_TTL_S, MIN_TTL_S
from headrace_gateway.error_body import BodyTimeout, BodyTooLarge
from headrace_gateway.http_exchange import Receive
from headrace_gateway.json_body import decode

# What a form's own marks add to a file; and the largest JSON body.
_FORM_BYTES = 64 * 1024
# The second has no files, and is told so.
_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
# Who uploads may take his time, but not fall silent.
_PIECE_TIMEOUT_S = 30.0

T = TypeVar("T")


class FileExpiry(msgspec.Struct, forbid_unknown_fields=True):
    """How long a file is kept. Seconds."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_TTL_S, le=MAX_TTL_S)]


@contextlib.asynccontextmanager
async def read_form(
    request: Request, fields: Collection[str], max_bytes: int
) -> AsyncIterator[FormData]:
    """Read a form; what does not fit in memory waits on disk, and nothing beyond the bound.

    Args:
        request: with the form.
        fields: that it may have.
        max_bytes: of its file.

    Raises:
        InvalidRequest: it is no such form.
        BodyTooLarge: its file is larger.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0]
    if content_type.strip().lower() not in _FORMS:
        raise _no_form(fields)
    told = f"The file is larger than {max_bytes} bytes."
    limited = Request(request.scope, _limited(request.receive, max_bytes + _FORM_BYTES, told))
    try:
        async with limited.form(max_files=1, max_fields=len(fields)) as form:
            for name in form:
                if name not in fields:
                    raise InvalidRequest(
                        f"Unrecognized request argument: {name[:100]}.", param=name[:100]
                    )
            yield form
    except HTTPException as error:
        raise _no_form(fields) from error


def file_of(form: FormData, name: str) -> UploadFile:
    """Return a form's file.

    Raises:
        InvalidRequest: there is none.
    """
    file = form.get(name)
    if not isinstance(file, UploadFile):
        raise InvalidRequest(f"Missing required parameter: {name}.", param=name)
    return file


async def pieces_of(file: UploadFile) -> AsyncIterator[bytes]:
    """Yield a file's content."""
    while piece := await file.read(CHUNK_BYTES):
        yield piece


async def read_json(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Read a JSON body.

    Raises:
        InvalidRequest: `param` names what is wrong.
        BodyTooLarge: it is larger than any that is meant.
    """
    told = f"The body is larger than {_FORM_BYTES} bytes."
    limited = Request(request.scope, _limited(request.receive, _FORM_BYTES, told))
    return decode(decoder, await limited.body())


def _no_form(fields: Collection[str]) -> InvalidRequest:
    *others, last = fields
    named = f"{', '.join(others)} and {last}" if others else last
    return InvalidRequest(f"The body must be multipart/form-data with one each of {named}.")


def _limited(receive: Receive, max_bytes: int, told: str) -> Any:  # Any: ASGI's receive
    size_bytes = 0

    async def count() -> Any:  # Any: an ASGI message
        nonlocal size_bytes
        try:
            async with asyncio.timeout(_PIECE_TIMEOUT_S):
                message = await receive()
        except TimeoutError:
            raise BodyTimeout("The body came too slowly.") from None
        if message["type"] == "http.disconnect":
            raise ClientGone("The client left before its body was read.")
        size_bytes += len(message.get("body", b""))
        if size_bytes > max_bytes:
            raise BodyTooLarge(told)
        return message

    return count
