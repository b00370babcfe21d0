"""The Worker contract: calls in, engine outputs out."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from opentelemetry import trace

from headrace_common.blocks import ALGORITHM, BLOCK_SIZE_TOKENS, index_stride, self_test
from headrace_common.clock import Clock
from headrace_common.errors import ModelNotFound, NotFound, Unavailable, Unimplemented
from headrace_common.rpc import Call
from headrace_contracts.types.v1.types_pb2 import HashRecipe, ReplicaRef, TokenUsage
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.calls import Calls, GenerateCall
from headrace_worker.constraints.compiler import ConstraintCompiler
from headrace_worker.drain import Drain
from headrace_worker.embed import embed, parse_embed
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.load import EngineLoad
from headrace_worker.engine.output import RequestOutput
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.generate_events import EventWriter
from headrace_worker.generate_request import RequestRules, parse
from headrace_worker.kv_transfer import KvTransfer
from headrace_worker.load_watch import ChangeSignal, load_reports
from headrace_worker.model.info import ModelInfo
from headrace_worker.sampling_defaults import SamplingDefaults

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Worker"]
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Served:
    """The model that this worker serves, once it is loaded."""

    model: str
    info: ModelInfo
    table: TokenTable
    engine: Engine
    kv_capacity_tokens: int
    max_requests: int
    constraints: ConstraintCompiler
    sampling_defaults: SamplingDefaults
    # None = this pool's blocks cannot be carried.
    transfer: KvTransfer | None = None

    @property
    def rules(self) -> RequestRules:
        """What requests are checked against."""
        return RequestRules(
            model=self.model,
            fingerprint=self.info.fingerprint,
            vocab_size=self.info.vocab_size,
            end_token_ids=frozenset(self.info.eos_token_ids),
        )


def hash_recipe(fingerprint: str, context_tokens: int) -> HashRecipe:
    """How this worker hashes blocks of the model.

    No window is declared, whatever the model's layers attend to: the pool keeps the KV of all
    layers of a block together, so a block is there for all of them or for none.
    """
    return HashRecipe(
        algorithm=ALGORITHM,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        model_fingerprint=fingerprint,
        self_test=self_test(fingerprint, BLOCK_SIZE_TOKENS),
        index_stride_blocks=index_stride(context_tokens),
    )


class WorkerState(ChangeSignal):
    """What this worker is at the moment, for all who ask.

    Args:
        replica: this life of this worker.
        drain: whether it is leaving.
        stuck_after_s: age of the last step that means stuck.
        device: what computes.
    """

    def __init__(
        self, replica: ReplicaRef, drain: Drain, stuck_after_s: float, device: str = "cpu"
    ) -> None:
        super().__init__()
        self.replica, self.device = replica, device
        self.served: Served | None = None
        self._drain, self._stuck_after_s = drain, stuck_after_s

    @property
    def value(self) -> pb.WorkerState.ValueType:
        """The state in the contract's words. Any thread."""
        if self.served is None:
            return pb.WORKER_STATE_LOADING
        if self.served.engine.stalled_s() > self._stuck_after_s:
            return pb.WORKER_STATE_STUCK
        if self._drain.is_draining:
            return pb.WORKER_STATE_DRAINING
        return pb.WORKER_STATE_READY

    @property
    def is_ready(self) -> bool:
        """Whether new work is welcome. Any thread."""
        return self.value == pb.WORKER_STATE_READY


class WorkerServicer:
    """Serves the Worker contract.

    Args:
        state: what this worker is.
        calls: the Generate calls under way.
        drain: how it leaves.
        clock: time.
        progress_ratio: returns the share of loading done.
        on_embedded: told of each Embed call that was answered, by request id.
        role: what routers may send here.
    """

    def __init__(
        self,
        state: WorkerState,
        calls: Calls,
        drain: Drain,
        clock: Clock,
        progress_ratio: Callable[[], float],
        on_embedded: Callable[[str, TokenUsage], None],
        role: pb.PoolRole.ValueType = pb.POOL_ROLE_UNSPECIFIED,
    ) -> None:
        self._state, self._calls, self._drain = state, calls, drain
        self._clock, self._progress_ratio = clock, progress_ratio
        self._on_embedded, self._role = on_embedded, role
        self._keys = itertools.count(1)

    async def Generate(  # noqa: N802 - contract name
        self, message: pb.GenerateRequest, _call: Call
    ) -> AsyncIterator[pb.GenerateEvent]:
        """Stream one request's output, one event per engine step, fewer if the caller is slow."""
        self._drain.check_admits()
        served = self._require_served()
        request = parse(message, served.rules, next(self._keys), self._clock.now_s())
        if message.HasField("constraint"):
            request.constraint = await served.constraints.compile(
                message.cache_salt, message.constraint
            )
            self._drain.check_admits()
        if message.HasField("kv_source") and served.transfer is not None:
            await served.transfer.take(message.kv_source.address, message, request)
            self._drain.check_admits()
        call = self._calls.open(request)
        try:
            served.engine.submit(request)
            self._state.notify()
            async for event in self._events(call, served):
                yield event
        finally:
            if self._calls.close(call):
                served.engine.abort(request.key)
            self._state.notify()

    async def Embed(self, message: pb.EmbedRequest, _call: Call) -> pb.EmbedResponse:  # noqa: N802 - contract name
        """Return one vector of unit length per input."""
        self._drain.check_admits()
        served = self._require_served()
        job = parse_embed(message, served.rules, self._keys, self._clock.now_s())
        response = await embed(job, self._calls, served.engine, self._state.notify)
        self._on_embedded(job.request_id, response.usage)
        return response

    async def Describe(self, _request: pb.DescribeRequest, _call: Call) -> pb.DescribeResponse:  # noqa: N802 - contract name
        """Say what this worker is; answers while the model is loading."""
        served = self._state.served
        return pb.DescribeResponse(
            replica=self._state.replica,
            state=self._state.value,
            models=[] if served is None else [_card(served)],
            kv_capacity_tokens=0 if served is None else served.kv_capacity_tokens,
            load_progress_ratio=self._progress_ratio(),
            device=self._state.device,
            role=self._role,
        )

    async def FetchTokenizer(  # noqa: N802 - contract name
        self, request: pb.FetchTokenizerRequest, _call: Call
    ) -> AsyncIterator[pb.TokenizerChunk]:
        """Send tokenizer.json."""
        served = self._state.served
        if served is None:
            raise NotFound("The model is still loading.", retry_after_s=1.0)
        if request.model != served.model:
            raise ModelNotFound(f"Model {request.model!r} is not served here.", param="model")
        data = served.info.tokenizer_json
        for start in range(0, len(data), _CHUNK_BYTES):
            yield pb.TokenizerChunk(data=data[start : start + _CHUNK_BYTES])

    def WatchLoad(  # noqa: N802 - contract name
        self, request: pb.WatchLoadRequest, _call: Call
    ) -> AsyncIterator[pb.LoadReport]:
        """Report at once, at each change and at least every interval."""
        return load_reports(request, self._state, self._load_report)

    async def Drain(self, request: pb.DrainRequest, _call: Call) -> pb.DrainResponse:  # noqa: N802 - contract name
        """Stop admitting, wait for what runs, then move the rest."""
        self._drain.begin()
        self._state.notify()
        result = await self._drain.drain(request.grace_ms / 1000)
        return pb.DrainResponse(num_finished=result.num_finished, num_moved=result.num_moved)

    async def PrefillKv(  # noqa: N802 - contract name
        self, message: pb.PrefillKvRequest, _call: Call
    ) -> AsyncIterator[pb.KvBlocks]:
        """Compute a prompt for another worker and send its blocks."""
        self._drain.check_admits()
        served = self._require_served()
        if served.transfer is None:
            raise Unimplemented("This engine does not hand over KV blocks.")
        parts = served.transfer.give(message, next(self._keys), self._state.notify)
        async with aclosing(parts):
            async for part in parts:
                yield part

    async def _events(self, call: GenerateCall, served: Served) -> AsyncIterator[pb.GenerateEvent]:
        writer = EventWriter(call.request, served.table, self._state.replica)
        while True:
            output = await call.take()
            if output.is_last:
                _explain(output)
            if _has_content(output):
                yield writer.event(output)
            if output.error is not None:
                raise output.error
            if output.is_last:
                return

    def _require_served(self) -> Served:
        if self._state.served is None:
            raise Unavailable("The model is still loading.", retry_after_s=1.0)
        return self._state.served

    def _load_report(self) -> pb.LoadReport:
        state, served = self._state, self._state.served
        load = EngineLoad() if served is None else served.engine.load
        return pb.LoadReport(
            replica=state.replica,
            state=state.value,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            queued_prefill_tokens=load.queued_prefill_tokens,
            running_tokens=load.running_tokens,
            kv_used_tokens=load.kv_used_tokens,
            kv_capacity_tokens=0 if served is None else served.kv_capacity_tokens,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_tokens_per_s=load.decode_tokens_per_s,
            decode_step_s=load.decode_step_s,
            decode_step_streams=load.decode_step_streams,
            prefix_hit_tokens_total=load.prefix_hit_tokens_total,
            prefix_query_tokens_total=load.prefix_query_tokens_total,
            num_preemptions_total=load.num_preemptions_total,
            max_requests=0 if served is None else served.max_requests,
        )


def _explain(output: RequestOutput) -> None:
    """Leave in the call's span where its time went."""
    span = trace.get_current_span()
    if output.times is not None:
        span.set_attribute("headrace.queue_s", output.times.queue_s)
        span.set_attribute("headrace.prefill_s", output.times.prefill_s)
        span.set_attribute("headrace.decode_s", output.times.decode_s)
        span.set_attribute("headrace.num_preemptions", output.times.num_preemptions)
    if output.usage is not None:
        span.set_attribute("headrace.prompt_tokens", output.usage.prompt_tokens)
        span.set_attribute("headrace.cached_tokens", output.usage.cached_tokens)
        span.set_attribute("headrace.output_tokens", output.usage.output_tokens)


def _has_content(output: RequestOutput) -> bool:
    if output.error is None:
        return True
    return bool(output.choices) or output.queue_s is not None


def _card(served: Served) -> pb.ModelCard:
    info = served.info
    return pb.ModelCard(
        model=served.model,
        fingerprint=info.fingerprint,
        context_tokens=served.engine.max_sequence_tokens,
        vocab_size=info.vocab_size,
        chat_template=info.chat_template,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id or 0,
        add_bos=info.add_bos,
        tokenizer_sha256=info.tokenizer_sha256,
        recipe=hash_recipe(info.fingerprint, info.context_tokens),
        special_tokens=dict(info.special_tokens),
        kv_bytes_per_token=info.kv_bytes_per_token,
        created_unix_s=info.created_unix_s,
        sampling_defaults=served.sampling_defaults.to_card(),
    )
