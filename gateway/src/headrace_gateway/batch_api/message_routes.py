"""/v1/messages/batches: create, list, retrieve, results, cancel, delete."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
import orjson
from fastapi import APIRouter, Query, Request
from msgspec import Meta
from starlette.responses import StreamingResponse

from headrace_common.errors import InvalidRequest
from headrace_common.ids import ulid
from headrace_gateway.answer_extras import Json
from headrace_gateway.api_request import Endpoint
from headrace_gateway.auth import KeyAuth
from headrace_gateway.batch_api.input_lines import MAX_LINES, InputLine
from headrace_gateway.batch_api.message_lines import ENDPOINT, message_batch, result_line
from headrace_gateway.batch_api.runner import BatchRunner
from headrace_gateway.batch_api.stored_batches import WINDOW_S, BatchOver, StoredBatches
from headrace_gateway.call_rate import CallRate
from headrace_gateway.json_body import decode
from headrace_gateway.messages_api.dialect import MessagesDialect, check_version
from headrace_gateway.state.owner_of import owner_of
from headrace_gateway.state.store import Owner
from headrace_gateway.visit import Caller

ID_PREFIX = "msgbatch_"
# The most that one page shows, whatever is asked for; SDKs turn it.
_MAX_PAGE = 100


class BatchedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One request; its `params` are a body of /v1/messages, read when its turn comes."""

    # Python's $ alone would let a line end pass.
    custom_id: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}(?!\s)$")]
    # Any number of them is read at once: not looked into here.
    params: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


class MessageBatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/messages/batches."""

    requests: Annotated[list[BatchedRequest], Meta(min_length=1, max_length=MAX_LINES)]


class _Params(msgspec.Struct):
    stream: bool | None = None


_DECODER = msgspec.json.Decoder(MessageBatchBody)
_PARAMS_DECODER = msgspec.json.Decoder(_Params)


class MessageBatchForm(MessagesDialect):
    """The errors of /v1/messages, counted as batches."""

    endpoint = Endpoint.BATCHES


class MessageBatchCreation:
    """Makes batches; called by the route of POST /v1/messages/batches.

    Args:
        batches: where they are kept.
        runner: told of new work.
        rate: bounds how often a tenant asks.
    """

    def __init__(self, batches: StoredBatches, runner: BatchRunner, rate: CallRate) -> None:
        self._batches, self._runner, self._rate = batches, runner, rate

    async def __call__(self, caller: Caller, body: bytes) -> bytes:
        """Add a batch; return its object."""
        check_version(caller.exchange)
        self._rate.count(caller.principal.tenant_id)
        lines = _lines(decode(_DECODER, body).requests)
        owner, batch_id = Owner.of(caller.principal), ID_PREFIX + ulid(self._batches.clock)
        now_s = self._batches.now_s()
        made = {
            "id": batch_id,
            "endpoint": ENDPOINT,
            "created_at": now_s,
            "expires_at": now_s + WINDOW_S,
        }
        key_id = caller.principal.key_id
        await self._batches.add(owner, key_id, made, now_s + WINDOW_S, lines)
        self._runner.wake()
        return orjson.dumps(message_batch(await self._batches.find(owner, batch_id)))


def _lines(requests: list[BatchedRequest]) -> list[InputLine]:
    """Return the lines of a batch.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    lines: list[InputLine] = []
    seen: set[str] = set()
    for idx, asked in enumerate(requests):
        path = f"requests[{idx}]"
        if asked.custom_id in seen:
            raise InvalidRequest(
                f"{path}.custom_id is that of an earlier request.", param=f"{path}.custom_id"
            )
        params = bytes(asked.params)
        try:
            is_stream = _PARAMS_DECODER.decode(params).stream
        except msgspec.DecodeError:
            told = f"{path}.params must be an object, its stream a boolean."
            raise InvalidRequest(told, param=f"{path}.params") from None
        if is_stream:
            raise InvalidRequest(
                "A request of a batch cannot be streamed.", param=f"{path}.params.stream"
            )
        seen.add(asked.custom_id)
        lines.append(InputLine(idx + 1, asked.custom_id, params))
    return lines


def message_batches_router(auth: KeyAuth, batches: StoredBatches, runner: BatchRunner) -> APIRouter:
    """Return the routes, but for the one that makes a batch."""
    router = APIRouter(tags=["batches"], prefix=f"{ENDPOINT}/batches")

    @router.get("")
    async def list_batches(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        after_id: str | None = None,
        before_id: str | None = None,
    ) -> Json:
        """List the project's message batches, newest first, at most 100 a page."""
        if after_id is not None and before_id is not None:
            raise InvalidRequest("Give either after_id or before_id.", param="before_id")
        owner, size = await owner_of(auth, request), min(limit, _MAX_PAGE)
        found = await batches.find_page(owner, size, after_id, before_id, param="after_id")
        shown = [message_batch(one) for one in found["data"]]
        return {name: found[name] for name in ("first_id", "last_id", "has_more")} | {"data": shown}

    @router.get("/{message_batch_id}")
    async def retrieve(message_batch_id: str, request: Request) -> Json:
        """Tell how far a batch is."""
        return message_batch(await batches.find(await owner_of(auth, request), message_batch_id))

    @router.post("/{message_batch_id}/cancel")
    async def cancel(message_batch_id: str, request: Request) -> Json:
        """End a batch early; what is answered by then is among its results."""
        owner = await owner_of(auth, request)
        await batches.want_cancel(owner, message_batch_id)
        runner.wake()
        batch = message_batch(await batches.find(owner, message_batch_id))
        if batch["cancel_initiated_at"] is None:
            raise BatchOver("A batch that has ended cannot be cancelled.")
        return batch

    @router.delete("/{message_batch_id}")
    async def delete(message_batch_id: str, request: Request) -> Json:
        """Forget a batch that has ended, and its results."""
        await batches.delete(await owner_of(auth, request), message_batch_id)
        return {"id": message_batch_id, "type": "message_batch_deleted"}

    @router.get(
        "/{message_batch_id}/results",
        response_class=StreamingResponse,
        responses={200: {"content": {"application/x-jsonl": {}}}},
    )
    async def results(message_batch_id: str, request: Request) -> StreamingResponse:
        """Download the results of a batch that has ended: one JSON line a request."""
        owner = await owner_of(auth, request)
        if message_batch(await batches.find(owner, message_batch_id))["results_url"] is None:
            raise InvalidRequest("The batch has not ended; it has no results yet.")
        pieces = _results(batches, message_batch_id)
        return StreamingResponse(pieces, media_type="application/x-jsonl")

    return router


async def _results(batches: StoredBatches, batch_id: str) -> AsyncIterator[bytes]:
    async for lines in batches.each_result(batch_id):
        yield b"".join(result_line(line) + b"\n" for line in lines)
