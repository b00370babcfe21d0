"""The Worker contract in front of somebody else's server."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from headrace_common.blocks import ALGORITHM, BLOCK_SIZE_TOKENS, self_test
from headrace_common.errors import (
    NotFound,
    QueueFull,
    ReplicaDraining,
    ReplicaLost,
    Unavailable,
    Unimplemented,
)
from headrace_common.rpc import Call
from headrace_contracts.types.v1.types_pb2 import HashRecipe, ReplicaRef
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.kv_refusals import NoKv
from headrace_worker.load_watch import ChangeSignal, load_reports
from headrace_worker.upstream.answer_reader import AnswerReader
from headrace_worker.upstream.client import UpstreamClient, UpstreamLoad, UpstreamModel
from headrace_worker.upstream.request_body import check_request, path_of

_log = logging.getLogger(__name__)

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Worker"]
_DEFAULT_CONTEXT_TOKENS = 32_768
_SETTLE_S = 1.0

# Told of each ended request: what was read of its answer, and why it ended.
OnEnded = Callable[[AnswerReader, pb.FinishReason.ValueType], None]


class UpstreamState(ChangeSignal):
    """What is known of the server and of our own requests there. Belongs to one event loop.

    Args:
        replica: this life of this worker.
        served_name: of the model.
        upstream: names server and model, for the fingerprint.
        context_tokens: 0 = as the server tells.
        max_requests: most under way.
    """

    def __init__(
        self,
        replica: ReplicaRef,
        served_name: str,
        upstream: str,
        context_tokens: int,
        max_requests: int,
    ) -> None:
        super().__init__()
        self.replica, self.served_name, self.max_requests = replica, served_name, max_requests
        self._fingerprint = hashlib.sha256(f"upstream {upstream}".encode()).hexdigest()
        self._context_tokens = context_tokens
        self.model: UpstreamModel | None = None
        self._card: pb.ModelCard | None = None
        self.load = UpstreamLoad()
        self.is_draining = False
        # Prompt tokens, as guessed, of requests without a first token; output so far of the others.
        self.running: dict[object, AnswerReader] = {}
        self._is_over = False
        # Of the streams that wait for their server.
        self._waits: set[asyncio.Timeout] = set()

    @property
    def value(self) -> pb.WorkerState.ValueType:
        """The state in the contract's words."""
        if self.is_draining:
            return pb.WORKER_STATE_DRAINING
        return pb.WORKER_STATE_LOADING if self.model is None else pb.WORKER_STATE_READY

    @property
    def is_ready(self) -> bool:
        """Whether new work is welcome. Any thread."""
        return self.value == pb.WORKER_STATE_READY

    def take(self, model: UpstreamModel | None, load: UpstreamLoad) -> None:
        """Take what a probe found; None = the server is not there."""
        self.model, self.load = model, load
        if model is not None:
            self._card = self._make_card(model)
        self.notify()

    def cards(self) -> list[pb.ModelCard]:
        """Return the model's card, once the server has been seen; it stays while it is away."""
        return [] if self._card is None else [self._card]

    @contextmanager
    def serving(self, reader: AnswerReader) -> Iterator[None]:
        """Count a request while it is under way.

        Raises:
            ReplicaDraining: we are leaving.
            QueueFull: too many are under way.
            Unavailable: the server is not there.
        """
        if self.is_draining:
            raise ReplicaDraining("This worker is leaving and takes no new requests.")
        if self.model is None:
            raise Unavailable("The engine behind this model is away.", retry_after_s=1.0)
        if len(self.running) >= self.max_requests:
            raise QueueFull("This worker's queue is full.", retry_after_s=1.0)
        key = object()
        self.running[key] = reader
        self.notify()
        try:
            yield
        finally:
            del self.running[key]
            self.notify()

    def end_streams(self) -> None:
        """Let every stream end: the grace is over."""
        self._is_over = True
        now_s = asyncio.get_running_loop().time()
        for wait in list(self._waits):
            wait.reschedule(now_s)

    @asynccontextmanager
    async def until_moved(self) -> AsyncIterator[None]:
        """Run a wait that `end_streams` ends.

        Raises:
            TimeoutError: the grace is over.
        """
        async with asyncio.timeout(0 if self._is_over else None) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    def report(self) -> pb.LoadReport:
        """Return the load: the server's own numbers where it tells them, else ours."""
        fresh = [it for it in self.running.values() if not it.has_started]
        begun = [it.usage for it in self.running.values() if it.has_started]
        running, waiting = self.load.num_running, self.load.num_waiting
        return pb.LoadReport(
            replica=self.replica,
            state=self.value,
            num_running=len(self.running) if running is None else running,
            num_waiting=0 if waiting is None else waiting,
            queued_prefill_tokens=sum(it.request.text.estimated_tokens for it in fresh),
            running_tokens=sum(it.prompt_tokens + it.output_tokens for it in begun),
            max_requests=self.max_requests,
        )

    def _make_card(self, model: UpstreamModel) -> pb.ModelCard:
        told = model.context_tokens or _DEFAULT_CONTEXT_TOKENS
        return pb.ModelCard(
            model=self.served_name,
            fingerprint=self._fingerprint,
            context_tokens=self._context_tokens or told,
            recipe=HashRecipe(
                algorithm=ALGORITHM,
                block_size_tokens=BLOCK_SIZE_TOKENS,
                model_fingerprint=self._fingerprint,
                self_test=self_test(self._fingerprint, BLOCK_SIZE_TOKENS),
            ),
            created_unix_s=model.created_unix_s,
            takes_text=True,
        )


class UpstreamServicer(NoKv):
    """Serves the Worker contract.

    Args:
        state: what is known.
        client: the server.
        body: makes the body for the server.
        on_ended: told of each request that ended.
    """

    def __init__(
        self,
        state: UpstreamState,
        client: UpstreamClient,
        body: Callable[[pb.GenerateRequest], dict[str, object]],
        on_ended: OnEnded,
    ) -> None:
        self._state, self._client = state, client
        self._body_of, self._on_ended = body, on_ended

    async def Generate(  # noqa: N802 - contract name
        self, message: pb.GenerateRequest, _call: Call
    ) -> AsyncIterator[pb.GenerateEvent]:
        """Stream one answer; the call's cancellation closes the connection to the server."""
        check_request(message, self._state.served_name)
        body = self._body_of(message)
        reader = AnswerReader(self._state.replica, message)
        with self._state.serving(reader):
            finish: pb.FinishReason.ValueType = pb.FINISH_REASON_ABORT
            try:
                async with self._client.stream(
                    path_of(message), body, message.request_id
                ) as chunks:
                    async for chunk in self._until_moved(chunks):
                        yield reader.read(chunk)
                if not reader.is_done:
                    raise ReplicaLost("The engine behind this model ended in mid-answer.")
                finish = reader.finish
                yield reader.last()
            finally:
                if reader.has_started:
                    self._on_ended(reader, finish)

    async def Embed(self, _message: pb.EmbedRequest, _call: Call) -> pb.EmbedResponse:  # noqa: N802 - contract name
        """Not offered."""
        raise Unimplemented("This model makes no embeddings here.", param="model")

    async def Describe(self, _request: pb.DescribeRequest, _call: Call) -> pb.DescribeResponse:  # noqa: N802 - contract name
        """Say what this worker is."""
        return pb.DescribeResponse(
            replica=self._state.replica,
            state=self._state.value,
            models=self._state.cards(),
            load_progress_ratio=float(self._state.model is not None),
            device="upstream",
        )

    async def FetchTokenizer(  # noqa: N802 - contract name
        self, _request: pb.FetchTokenizerRequest, _call: Call
    ) -> AsyncIterator[pb.TokenizerChunk]:
        """There is none: the card says so."""
        raise NotFound("This engine tokenises by itself.", param="model")
        yield  # a stream that ends before its first chunk

    def WatchLoad(  # noqa: N802 - contract name
        self, request: pb.WatchLoadRequest, _call: Call
    ) -> AsyncIterator[pb.LoadReport]:
        """Report at once, at each change and at least every interval."""
        return load_reports(request, self._state, self._state.report)

    async def Drain(self, request: pb.DrainRequest, _call: Call) -> pb.DrainResponse:  # noqa: N802 - contract name
        """Stop admitting, wait for what runs, end the rest."""
        num_finished, num_moved = await self.drain(request.grace_ms / 1000)
        return pb.DrainResponse(num_finished=num_finished, num_moved=num_moved)

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Leave; return how many streams finished and how many were ended."""
        state = self._state
        state.is_draining = True
        state.notify()
        num_before = len(state.running)
        await self._wait_idle(grace_s)
        num_moved = len(state.running)
        state.end_streams()
        await self._wait_idle(_SETTLE_S)
        return num_before - num_moved, num_moved

    async def _wait_idle(self, within_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._state.running:
                    await self._state.wait(within_s)

    async def _until_moved(
        self, chunks: AsyncIterator[dict[str, object]]
    ) -> AsyncIterator[dict[str, object]]:
        """Yield chunks until the drain's grace ends."""
        nothing: dict[str, object] = {}
        while True:
            try:
                async with self._state.until_moved():
                    chunk = await anext(chunks, nothing)
            except TimeoutError as error:
                raise ReplicaDraining("This worker is leaving.") from error
            if chunk is nothing:
                return
            yield chunk
