"""Files and batches of both APIs, wired together: what the gateway takes into its own."""

from __future__ import annotations

from fastapi import APIRouter

from headrace_common.ids import ulid
from headrace_gateway.api_request import Endpoint
from headrace_gateway.asgi import CallRoute, RouteContext
from headrace_gateway.auth import KeyAuth
from headrace_gateway.batch_api import batch_routes, message_routes
from headrace_gateway.batch_api.batch_routes import BatchCreation, batches_router
from headrace_gateway.batch_api.file_routes import files_router
from headrace_gateway.batch_api.line_call import LineCaller
from headrace_gateway.batch_api.message_lines import ENDPOINT as MESSAGES
from headrace_gateway.batch_api.message_routes import (
    MessageBatchCreation,
    MessageBatchForm,
    message_batches_router,
)
from headrace_gateway.batch_api.runner import BatchRunner, RunnerParts
from headrace_gateway.batch_api.stored_batches import StoredBatches
from headrace_gateway.batch_api.stored_files import FileLimits, StoredFiles
from headrace_gateway.batch_api.stored_uploads import StoredUploads
from headrace_gateway.batch_api.upload_routes import UploadCreation, uploads_router
from headrace_gateway.call_rate import CallRate
from headrace_gateway.embeddings import EmbeddingsDialect
from headrace_gateway.http_exchange import AsgiApp
from headrace_gateway.messages_api.dialect import MessagesDialect
from headrace_gateway.model_directory import ModelDirectory
from headrace_gateway.openai_dialect import OpenAiDialect, OpenAiErrors
from headrace_gateway.openai_schema import parse_chat, parse_completion
from headrace_gateway.request_flow import RequestFlow
from headrace_gateway.state.store import StateStore
from headrace_gateway.visit import Dialect


class BatchApi:
    """The parts, and the routes to them.

    Args:
        state: where all of it is kept.
        limits: of files; batches are kept as long.
        flow: serves lines.
        auth: checks keys.
        rate: bounds how often a tenant makes something.
        directory: says whether requests wait, and whether models may still come.
        concurrency: lines under way at once; 0 = none is run here.
    """

    def __init__(
        self,
        state: StateStore,
        limits: FileLimits,
        flow: RequestFlow,
        auth: KeyAuth,
        rate: CallRate,
        directory: ModelDirectory,
        concurrency: int,
    ) -> None:
        self._auth, self._rate = auth, rate
        self._max_bytes = limits.max_bytes
        self._files = StoredFiles(state, limits)
        self._uploads = StoredUploads(state, self._files)
        self._batches = StoredBatches(state, limits.ttl_s, batch_routes.ID_PREFIX)
        self._message_batches = StoredBatches(state, limits.ttl_s, message_routes.ID_PREFIX)
        self._file_dialects: dict[str, Dialect] = {
            "/v1/chat/completions": OpenAiDialect(Endpoint.CHAT, parse_chat),
            "/v1/completions": OpenAiDialect(Endpoint.COMPLETIONS, parse_completion),
            "/v1/embeddings": EmbeddingsDialect(),
        }
        # What a line may ask for, by its URL.
        self.dialects = {**self._file_dialects, MESSAGES: MessagesDialect()}
        parts = RunnerParts(
            batches=self._batches,
            files=self._files,
            caller=LineCaller(flow, self.dialects, lambda: directory.is_starting),
            auth=auth,
            is_busy=lambda: directory.num_waiting > 0,
            concurrency=concurrency,
        )
        self.runner = BatchRunner(parts, ulid(state.clock))

    def posts(self, context: RouteContext) -> dict[str, AsgiApp]:
        """Return the routes that take a JSON body, by path."""
        creation = BatchCreation(
            self._batches, self._files, self.runner, tuple(self._file_dialects), self._rate
        )
        of_messages = MessageBatchCreation(self._message_batches, self.runner, self._rate)
        upload = UploadCreation(self._uploads, self._max_bytes, self._rate)
        return {
            "/v1/uploads": CallRoute(OpenAiErrors(Endpoint.UPLOADS), context, upload),
            "/v1/batches": CallRoute(OpenAiErrors(Endpoint.BATCHES), context, creation),
            f"{MESSAGES}/batches": CallRoute(MessageBatchForm(), context, of_messages),
        }

    def routers(self) -> list[APIRouter]:
        """Return the other routes."""
        return [
            files_router(self._auth, self._files),
            uploads_router(self._auth, self._uploads, self._max_bytes),
            batches_router(self._auth, self._batches, self.runner),
            message_batches_router(self._auth, self._message_batches, self.runner),
        ]
