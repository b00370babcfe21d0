"""Responses that are kept: retrieve, delete, cancel, list what was given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse

from headrace_common.errors import InvalidRequest
from headrace_gateway.answer_extras import Json
from headrace_gateway.auth import KeyAuth
from headrace_gateway.error_body import UnknownUrl
from headrace_gateway.pages import page
from headrace_gateway.responses_api.background import BackgroundResponses
from headrace_gateway.responses_api.kept import Kept, KeptResponses
from headrace_gateway.state.owner_of import owner_of

_EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
# Returns a response to its owner.
Find = Callable[[Request, str], Awaitable[Kept]]
_CANCEL_POLLS, _CANCEL_POLL_S = 40, 0.1


def responses_router(
    auth: KeyAuth, kept: KeptResponses, background: BackgroundResponses
) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["responses"], prefix="/v1/responses/{response_id}")

    async def find(request: Request, response_id: str) -> Kept:
        owner = await owner_of(auth, request)
        return await kept.find(owner, response_id)

    _add_reading(router, find, background)

    @router.post("", include_in_schema=False)
    async def unknown(response_id: str) -> Json:
        """Say of `compact` and the like that they are not here, as of any URL."""
        raise UnknownUrl(f"Unknown request URL: POST /v1/responses/{response_id[:100]}.")

    @router.delete("")
    async def delete(response_id: str, request: Request) -> Json:
        """Forget a response; a background one is stopped."""
        owner = await owner_of(auth, request)
        await kept.delete(owner, response_id)
        background.cancel(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/cancel")
    async def cancel(response_id: str, request: Request) -> Json:
        """Stop a background response, wherever it runs."""
        found = await find(request, response_id)
        _check_background(found)
        if not found.is_finished:
            await kept.want_cancel(response_id)
            background.cancel(response_id)
            found = await _finished(lambda: find(request, response_id))
        return found.response

    return router


def _add_reading(router: APIRouter, find: Find, background: BackgroundResponses) -> None:
    @router.get("", response_model=None, responses={200: {"content": {"text/event-stream": {}}}})
    async def retrieve(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
        include_obfuscation: bool = False,
    ) -> Json | StreamingResponse:
        """Return a response that was kept, finished or not; or its events, from one on."""
        if include_obfuscation:
            raise InvalidRequest("include_obfuscation is not offered.", param="include_obfuscation")
        found = await find(request, response_id)
        if not stream:
            if starting_after is not None:
                raise InvalidRequest("starting_after needs stream=true.", param="starting_after")
            return found.response
        await _check_streamed(background, response_id)
        start = 0 if starting_after is None else starting_after + 1
        events = background.follow(lambda: find(request, response_id), response_id, start)
        return StreamingResponse(events, media_type="text/event-stream", headers=_EVENT_HEADERS)

    @router.get("/input_items")
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Json:
        """List the items that were given for a response."""
        found = await find(request, response_id)
        items = found.input_items if order == "asc" else found.input_items[::-1]
        return page(items, limit, after)


async def _check_streamed(background: BackgroundResponses, response_id: str) -> None:
    if not await background.is_streamed(response_id):
        raise InvalidRequest(
            "Only a response made with background=true and stream=true can be streamed again.",
            param="stream",
        )


def _check_background(found: Kept) -> None:
    if not found.response["background"]:
        raise InvalidRequest(
            "Only a response made with background=true can be cancelled.", param="response_id"
        )


async def _finished(find: Callable[[], Awaitable[Kept]]) -> Kept:
    """Wait, a bounded time, until whoever works on a response has stopped."""
    found = await find()
    for _ in range(_CANCEL_POLLS):
        if found.is_finished:
            break
        await asyncio.sleep(_CANCEL_POLL_S)
        found = await find()
    return found
