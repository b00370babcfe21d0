"""Composition root of the adapter: starts its parts, takes them down in order."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from prometheus_client import CollectorRegistry

from headrace_common.clock import Clock, unix_us
from headrace_common.ids import new_incarnation
from headrace_common.lifecycle import Lifecycle, cancel_and_wait, serve, supervise
from headrace_common.metrics import ObservabilityServer, RpcMetrics
from headrace_common.rpc_server import RpcServer
from headrace_common.settings import split_address
from headrace_contracts.types.v1.types_pb2 import ReplicaRef
from headrace_contracts.usage.v1.usage_pb2 import WorkerUsage
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.metrics import WorkerMetrics
from headrace_worker.settings import UpstreamSettings
from headrace_worker.upstream.answer_reader import AnswerReader
from headrace_worker.upstream.client import UpstreamClient, UpstreamLoad
from headrace_worker.upstream.request_body import body_of
from headrace_worker.upstream.servicer import DESCRIPTOR, UpstreamServicer, UpstreamState
from headrace_worker.usage_witness import UsageWitness

_log = logging.getLogger(__name__)
_FLUSH_S = 2.0
_OUTCOMES = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


class UpstreamApp:
    """One adapter process.

    Args:
        settings: every knob.
        clock: time.
        registry: where metrics are made.
    """

    def __init__(
        self, settings: UpstreamSettings, clock: Clock, registry: CollectorRegistry
    ) -> None:
        self._settings, self._clock, self._registry = settings, clock, registry
        self.metrics = WorkerMetrics(registry)
        replica = ReplicaRef(worker_id=settings.worker_id, incarnation=new_incarnation(clock))
        self.state = UpstreamState(
            replica,
            settings.served_name,
            # By the model alone: two servers of one model share what is known of its prefixes.
            settings.model,
            settings.context_tokens,
            settings.max_requests,
        )
        self._client = UpstreamClient(
            settings.url, settings.key(), settings.connect_timeout_s, settings.silence_timeout_s
        )
        self._servicer = UpstreamServicer(
            self.state,
            self._client,
            partial(
                body_of,
                model=settings.model,
                continuous_usage=settings.continuous_usage,
                cache_salt=settings.cache_salt,
            ),
            self._ended,
        )
        self._server = RpcServer(
            settings.listen, [(DESCRIPTOR, self._servicer)], RpcMetrics(registry)
        )
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
    def address(self) -> str:
        """Where gRPC listens."""
        return f"127.0.0.1:{self._server.port}"

    async def start(self) -> None:
        """Listen; the server may come later.

        Raises:
            OSError: an address cannot be bound.
        """
        await self._server.start()
        host, port = split_address(self._settings.metrics_listen)
        self._observability = ObservabilityServer(
            host, port, self._registry, lambda: not self.state.is_draining
        )
        self.metrics.running_requests.set_function(lambda: len(self.state.running))
        self.metrics.load_progress_ratio.set_function(lambda: float(self.state.model is not None))
        self._tasks.append(asyncio.create_task(supervise("upstream probe", self._probe)))
        if self._witness is not None:
            self._tasks.append(asyncio.create_task(self._witness.run()))
        _log.info(
            "listening on port %d for %s at %s",
            self._server.port, self._settings.served_name, self._settings.url,
        )  # fmt: skip

    async def stop(self) -> None:
        """Drain within the grace, then take everything down."""
        await self._servicer.drain(self._settings.drain_grace_s)
        await self._server.stop(0.2)
        if self._witness is not None:
            await self._witness.flush(_FLUSH_S)
        await cancel_and_wait(*self._tasks)
        await self._client.close()
        if self._observability is not None:
            await asyncio.to_thread(self._observability.close)

    async def _probe(self) -> None:
        """Look at the server again and again."""
        while True:
            model = await self._client.fetch_model(self._settings.model)
            load = UpstreamLoad() if model is None else await self._client.fetch_load()
            if (model is None) != (self.state.model is None):
                _log.warning("the upstream is %s", self._client.trouble or "there")
            self.state.take(model, load)
            await self._server.set_ready(self.state.is_ready)
            await asyncio.sleep(self._settings.probe_interval_s)

    def _ended(self, reader: AnswerReader, reason: pb.FinishReason.ValueType) -> None:
        usage = reader.usage
        self.metrics.requests.labels(_OUTCOMES.get(reason, "failed")).inc()
        self.metrics.output_tokens.inc(usage.output_tokens)
        self.metrics.prefix_query_tokens.inc(usage.prompt_tokens)
        self.metrics.prefix_hit_tokens.inc(usage.cached_gpu_tokens)
        # A guess is no witness: the ledger would take it for a count.
        if self._witness is not None and not reader.is_estimate:
            self._witness.record(
                WorkerUsage(
                    request_id=reader.request.request_id,
                    replica=self.state.replica,
                    usage=usage,
                    finish_reason=reason,
                    occurred_unix_us=unix_us(self._clock),
                )
            )


async def serve_upstream(
    settings: UpstreamSettings, clock: Clock, registry: CollectorRegistry
) -> None:
    """Run an adapter until SIGTERM or SIGINT.

    Raises:
        OSError: an address cannot be bound.
    """
    await serve(UpstreamApp(settings, clock, registry), Lifecycle())
