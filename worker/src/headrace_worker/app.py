"""Composition root: builds the worker's parts, starts them, and takes them down in order."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from prometheus_client import CollectorRegistry

from headrace_common.blocks import BLOCK_SIZE_TOKENS, index_stride
from headrace_common.clock import Clock, unix_us
from headrace_common.errors import QueueFull
from headrace_common.ids import new_incarnation
from headrace_common.lifecycle import Lifecycle, cancel_and_wait
from headrace_common.metrics import ObservabilityServer, RpcMetrics
from headrace_common.rpc_server import RpcServer
from headrace_common.settings import split_address
from headrace_contracts.cache_index.v1 import cache_index_pb2
from headrace_contracts.types.v1.types_pb2 import ReplicaRef, TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import WorkerUsage
from headrace_contracts.worker.v1.worker_pb2 import (
    POOL_ROLE_DECODE,
    POOL_ROLE_PREFILL,
    POOL_ROLE_UNSPECIFIED,
    FinishReason,
    PoolRole,
)
from headrace_worker.calls import Calls, GenerateCall
from headrace_worker.constraints.compiler import ConstraintCompiler
from headrace_worker.constraints.matcher import tokenizer_of
from headrace_worker.drain import Drain
from headrace_worker.engine.block_events import BlockEventLog
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.output import RequestOutput
from headrace_worker.engine.profile import Timeline
from headrace_worker.engine.request import Finish
from headrace_worker.engine.scheduler import SchedulerLimits
from headrace_worker.generate_events import finish_reason, token_usage
from headrace_worker.kernels.rounding import Rounding
from headrace_worker.kv_events import KvPublisher
from headrace_worker.kv_transfer import KvTransfer
from headrace_worker.metrics import WorkerMetrics
from headrace_worker.model.kv_memory import BlockMemory
from headrace_worker.model_host import ModelHost, ReadyModel
from headrace_worker.sampling_defaults import resolve
from headrace_worker.server import (
    DESCRIPTOR,
    Served,
    WorkerServicer,
    WorkerState,
    hash_recipe,
)
from headrace_worker.settings import WorkerSettings
from headrace_worker.usage_witness import UsageWitness
from headrace_worker.vllm_names import VllmNames

_log = logging.getLogger(__name__)

_HEALTH_INTERVAL_S = 0.2
LOAD_THREAD = "load"
_FLUSH_S = 2.0
_ROLES: Final[dict[str, PoolRole.ValueType]] = {
    "both": POOL_ROLE_UNSPECIFIED,
    "prefill": POOL_ROLE_PREFILL,
    "decode": POOL_ROLE_DECODE,
}


class WorkerApp:
    """One worker process.

    Args:
        settings: every knob.
        clock: time.
        registry: where metrics are made.
        load: brings the model into memory, on a thread; tests pass their own.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        clock: Clock,
        registry: CollectorRegistry,
        load: Callable[[], ReadyModel] | None = None,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._registry = registry
        self.metrics = WorkerMetrics(registry)
        registry.register(VllmNames(self.metrics, settings.model_name))
        self._host = ModelHost(
            settings.model_path,
            settings.cache_dir,
            settings.kv_capacity_tokens,
            settings.compute_threads(),
            Rounding[settings.activations.upper()],
            settings.device,
        )
        self._load = load or self._host.load
        self.replica = ReplicaRef(worker_id=settings.worker_id, incarnation=new_incarnation(clock))
        self._calls = Calls(self._request_ended)
        self._drain = Drain(self._calls)
        self.state = WorkerState(self.replica, self._drain, settings.stuck_after_s, settings.device)
        servicer = WorkerServicer(
            self.state,
            self._calls,
            self._drain,
            clock,
            lambda: self._host.progress_ratio,
            self._embedded,
            _ROLES[settings.role],
        )
        self._server = RpcServer(settings.listen, [(DESCRIPTOR, servicer)], RpcMetrics(registry))
        self._witness = (
            UsageWitness(
                settings.kafka_bootstrap,
                settings.worker_id,
                self.metrics,
                settings.kafka_topic_replicas,
            )
            if settings.kafka_bootstrap
            else None
        )
        self._observability: ObservabilityServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        """Where gRPC listens."""
        return self._server.port

    async def start(self) -> None:
        """Listen, then load the model and start the engine; returns once requests are welcome.

        Raises:
            OSError: an address cannot be bound.
            HeadraceError: the model cannot be loaded.
        """
        await self._server.start()
        host, port = split_address(self._settings.metrics_listen)
        self._observability = ObservabilityServer(
            host, port, self._registry, lambda: self.state.is_ready
        )
        self.metrics.load_progress_ratio.set_function(lambda: self._host.progress_ratio)
        self._tasks.append(asyncio.create_task(self._follow_health()))
        if self._witness is not None:
            self._tasks.append(asyncio.create_task(self._witness.run()))
        _log.info("listening on port %d, loading %s", self.port, self._settings.model_path)
        self._serve(await _on_daemon_thread(self._load))
        _log.info("serving %s", self._settings.model_name)

    async def stop(self) -> None:
        """Drain within the grace, then take everything down. Also after a failed start."""
        _log.info(
            "leaving: %d streams run, grace %.0f s",
            self._calls.num_served,
            self._settings.drain_grace_s,
        )
        self._drain.begin()
        self.state.notify()
        await self._drain.drain(self._settings.drain_grace_s)
        await self._server.stop(0.2)
        if self.state.served is not None:
            await asyncio.to_thread(self.state.served.engine.stop)
            self.state.served.constraints.close()
        if self._witness is not None:
            await self._witness.flush(_FLUSH_S)
        await cancel_and_wait(*self._tasks)
        if self._observability is not None:
            await asyncio.to_thread(self._observability.close)

    def _serve(self, model: ReadyModel) -> None:
        settings = self._settings
        events = BlockEventLog(index_stride=index_stride(model.info.context_tokens))
        engine = Engine(
            runner=model.runner,
            num_blocks=model.num_blocks,
            limits=SchedulerLimits(
                token_budget=settings.token_budget_tokens,
                max_running=min(settings.max_running, settings.token_budget_tokens),
                max_waiting=settings.max_waiting,
                context_tokens=model.info.context_tokens,
                block_size=BLOCK_SIZE_TOKENS,
                checks_books=settings.check_invariants,
                slowdown_ratio=settings.stream_slowdown_ratio,
            ),
            table=model.table,
            events=events,
            sink=self._sink(),
            clock=self._clock,
            on_step=self.metrics.observe_step,
        )
        served = self._served(model, engine)
        self.metrics.watch(lambda: engine.load, engine.stalled_s, served.kv_capacity_tokens)
        if settings.profile_file is not None:
            engine.record(Timeline(settings.profile_file, settings.profile_steps))
        engine.start()
        served.constraints.prepare()
        self.state.served = served
        self.state.notify()
        if settings.cache_index_address:
            publisher = KvPublisher(
                settings.cache_index_address, self._hello(served), events, self.metrics
            )
            self._tasks.append(asyncio.create_task(publisher.run()))

    def _served(self, model: ReadyModel, engine: Engine) -> Served:
        settings = self._settings
        served = Served(
            model=settings.model_name,
            info=model.info,
            table=model.table,
            engine=engine,
            kv_capacity_tokens=model.num_blocks * BLOCK_SIZE_TOKENS,
            max_requests=settings.max_running + settings.max_waiting,
            constraints=ConstraintCompiler(
                lambda: tokenizer_of(model.info, model.table), self._clock, self.metrics
            ),
            sampling_defaults=resolve(settings.sampling_defaults, model.info.sampling_defaults),
        )
        _log.info("requests that name none are sampled with %s", served.sampling_defaults.said)
        if not isinstance(model.runner, BlockMemory):
            return served
        transfer = KvTransfer(
            engine,
            model.runner,
            served.rules,
            self._calls,
            self._clock,
            self.metrics,
            settings.kv_transfer_timeout_s,
        )
        return replace(served, transfer=transfer)

    def _hello(self, served: Served) -> cache_index_pb2.Hello:
        return cache_index_pb2.Hello(
            replica=self.replica,
            model=served.model,
            recipe=hash_recipe(served.info.fingerprint, served.info.context_tokens),
            kv_capacity_blocks=served.kv_capacity_tokens // BLOCK_SIZE_TOKENS,
        )

    def _sink(self) -> Callable[[list[RequestOutput]], None]:
        loop = asyncio.get_running_loop()

        def deliver(outputs: list[RequestOutput]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._dispatch, outputs)

        return deliver

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        self._calls.dispatch(outputs)
        self.state.notify()

    def _request_ended(self, call: GenerateCall, output: RequestOutput) -> None:
        request, metrics = call.request, self.metrics
        metrics.requests.labels(_outcome(call, output)).inc()
        times = output.times
        if times is None:
            return
        metrics.prefix_query_tokens.inc(len(request.prompt_token_ids))
        metrics.prefix_hit_tokens.inc(request.cached_tokens)
        metrics.output_tokens.inc(request.output_tokens)
        if request.constraint is not None:
            metrics.constrained_tokens.inc(request.output_tokens)
        metrics.queue_s.observe(times.queue_s)
        if request.first_token_s is not None:
            metrics.ttft_s.observe(times.queue_s + times.prefill_s)
            if request.output_tokens > request.num_choices:
                per_choice = request.output_tokens / request.num_choices
                metrics.tpot_s.observe(times.decode_s / (per_choice - 1))
        if request.pooling is None and not request.is_for_transfer:
            reason = finish_reason(_finish(call, output))
            self._bear_witness(request.request_id, token_usage(output.usage), reason)

    def _embedded(self, request_id: str, usage: TokenUsage) -> None:
        self._bear_witness(request_id, usage, FinishReason.FINISH_REASON_STOP)

    def _bear_witness(
        self, request_id: str, usage: TokenUsage, reason: FinishReason.ValueType
    ) -> None:
        if self._witness is not None:
            self._witness.record(
                WorkerUsage(
                    request_id=request_id,
                    replica=self.replica,
                    usage=usage,
                    finish_reason=reason,
                    occurred_unix_us=unix_us(self._clock),
                )
            )

    async def _follow_health(self) -> None:
        """Let the gRPC health protocol say what the state is."""
        said = False
        while True:
            if self.state.is_ready != said:
                said = not said
                await self._server.set_ready(said)
            await self.state.wait(_HEALTH_INTERVAL_S)


async def _on_daemon_thread(load: Callable[[], ReadyModel]) -> ReadyModel:
    """Run *load* on a thread that does not keep the process alive if it is told to stop meanwhile.

    Nothing is lost then: a prepared model appears whole or not at all.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[ReadyModel] = loop.create_future()

    def settle(model: ReadyModel | None, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        elif model is not None:
            result.set_result(model)

    def work() -> None:
        model, error = None, None
        try:
            model = load()
        except Exception as caught:  # noqa: BLE001 - edge of the thread: handed to the waiting side
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, model, error)

    threading.Thread(target=work, name=LOAD_THREAD, daemon=True).start()
    return await result


def _finish(call: GenerateCall, output: RequestOutput) -> Finish | None:
    if output.error is not None:
        return None
    aborted = any(seq.finish is Finish.ABORT for seq in call.request.sequences)
    return Finish.ABORT if aborted else call.finish


def _outcome(call: GenerateCall, output: RequestOutput) -> str:
    if isinstance(output.error, QueueFull):
        return "refused"
    finish = _finish(call, output)
    return "failed" if finish is None else finish.value


async def serve(settings: WorkerSettings, clock: Clock, registry: CollectorRegistry) -> None:
    """Run a worker until SIGTERM or SIGINT.

    Raises:
        HeadraceError: the model cannot be loaded.
        OSError: an address cannot be bound.
    """
    lifecycle = Lifecycle()
    lifecycle.install_signals()
    app = WorkerApp(settings, clock, registry)
    starting = asyncio.create_task(app.start())
    stopping = asyncio.create_task(lifecycle.stopping.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await stopping
    finally:
        await app.stop()
        await cancel_and_wait(starting, stopping)
