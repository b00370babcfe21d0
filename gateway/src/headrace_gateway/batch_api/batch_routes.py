"""/v1/batches: create, list, retrieve, cancel."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import orjson
from fastapi import APIRouter, Query, Request

from headrace_common.errors import InvalidRequest
from headrace_common.ids import ulid
from headrace_gateway.answer_extras import Json
from headrace_gateway.auth import KeyAuth
from headrace_gateway.batch_api.runner import BatchRunner
from headrace_gateway.batch_api.stored_batches import WINDOW_S, BatchOver, StoredBatches
from headrace_gateway.batch_api.stored_files import REQUESTS, StoredFiles
from headrace_gateway.batch_api.upload_forms import FileExpiry
from headrace_gateway.call_rate import CallRate
from headrace_gateway.json_body import decode
from headrace_gateway.openai_bodies import Labels, Text
from headrace_gateway.state.owner_of import owner_of
from headrace_gateway.state.store import Owner
from headrace_gateway.visit import Caller

ID_PREFIX = "batch_"
# Kept with a batch for whoever works on it.
_HIDDEN = ("ends_as", "output_ttl_s")


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: Text
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Labels | None = None
    output_expires_after: FileExpiry | None = None


_DECODER = msgspec.json.Decoder(BatchBody)


class BatchCreation:
    """Makes batches; called by the route of POST /v1/batches.

    Args:
        batches: where they are kept.
        files: their input.
        runner: told of new work.
        endpoints: paths that lines may go to.
        rate: bounds how often a tenant asks.
    """

    def __init__(
        self,
        batches: StoredBatches,
        files: StoredFiles,
        runner: BatchRunner,
        endpoints: tuple[str, ...],
        rate: CallRate,
    ) -> None:
        self._batches, self._files = batches, files
        self._runner, self._endpoints, self._rate = runner, endpoints, rate

    async def __call__(self, caller: Caller, body: bytes) -> bytes:
        """Add a batch; return its object."""
        self._rate.count(caller.principal.tenant_id)
        asked = decode(_DECODER, body)
        if asked.endpoint not in self._endpoints:
            known = ", ".join(self._endpoints)
            raise InvalidRequest(f"endpoint must be one of {known}.", param="endpoint")
        owner = Owner.of(caller.principal)
        await self._check_input(owner, asked.input_file_id)
        now_s = self._batches.now_s()
        batch_id = ID_PREFIX + ulid(self._batches.clock)
        made = _fresh(batch_id, asked, now_s)
        key_id = caller.principal.key_id
        await self._batches.add(owner, key_id, made, now_s + WINDOW_S)
        self._runner.wake()
        return orjson.dumps(_shown(await self._batches.find(owner, batch_id)))

    async def _check_input(self, owner: Owner, file_id: str) -> None:
        param = "input_file_id"
        purpose = (await self._files.find(owner, file_id, param))["purpose"]
        if purpose != REQUESTS:
            raise InvalidRequest(
                f"The input file must have the purpose {REQUESTS!r}; this one has {purpose!r}.",
                param=param,
            )


def _fresh(batch_id: str, asked: BatchBody, now_s: int) -> Json:
    moments = (
        "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
    )  # fmt: skip
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": asked.endpoint,
        "errors": None,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now_s,
        "expires_at": now_s + WINDOW_S,
        "metadata": asked.metadata,
        "usage": None,
        "output_ttl_s": asked.output_expires_after and asked.output_expires_after.seconds,
        **{f"{moment}_at": None for moment in moments},
    }


def batches_router(auth: KeyAuth, batches: StoredBatches, runner: BatchRunner) -> APIRouter:
    """Return the routes, but for the one that makes a batch."""
    router = APIRouter(tags=["batches"], prefix="/v1/batches")

    @router.get("")
    async def list_batches(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
    ) -> Json:
        """List the project's batches, newest first."""
        found = await batches.find_page(await owner_of(auth, request), limit, after)
        return {**found, "data": [_shown(one) for one in found["data"]]}

    @router.get("/{batch_id}")
    async def retrieve(batch_id: str, request: Request) -> Json:
        """Tell how far a batch is."""
        return _shown(await batches.find(await owner_of(auth, request), batch_id))

    @router.post("/{batch_id}/cancel")
    async def cancel(batch_id: str, request: Request) -> Json:
        """End a batch early; what is answered by then can be downloaded."""
        owner = await owner_of(auth, request)
        await batches.want_cancel(owner, batch_id)
        runner.wake()
        batch = await batches.find(owner, batch_id)
        if batch["cancelling_at"] is None:
            raise BatchOver(f"A batch that is {batch['status']} cannot be cancelled.")
        return _shown(batch)

    return router


def _shown(batch: Json) -> Json:
    return {name: value for name, value in batch.items() if name not in _HIDDEN}
