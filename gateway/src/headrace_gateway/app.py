"""Composition root: builds the parts, starts them, drains them."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from headrace_common.clock import Clock, SystemClock
from headrace_common.lifecycle import Lifecycle, cancel_and_wait, supervise
from headrace_common.limits.local_share import LocalShare
from headrace_common.metrics import ObservabilityServer, new_registry, watch_disk
from headrace_common.settings import split_address
from headrace_common.succession import Succession
from headrace_gateway.admission import Admission
from headrace_gateway.api_request import Endpoint
from headrace_gateway.asgi import CallRoute, GatewayApp, HotRoute, HttpLimits, RouteContext
from headrace_gateway.auth import KeyAuth
from headrace_gateway.batch_api.api import BatchApi
from headrace_gateway.batch_api.stored_files import FileLimits
from headrace_gateway.call_rate import CallRate
from headrace_gateway.clients.billing import BillingClient
from headrace_gateway.clients.guard import GuardClient
from headrace_gateway.clients.ratelimit import RateLimitClient
from headrace_gateway.clients.router import RouterClient
from headrace_gateway.clients.worker import WorkerSessions
from headrace_gateway.closings import Closings
from headrace_gateway.cross_origin import CrossOrigin
from headrace_gateway.generation import Generator
from headrace_gateway.http_exchange import AsgiApp
from headrace_gateway.http_server import HttpServer
from headrace_gateway.idempotency import Idempotency
from headrace_gateway.input_guard import InputGuard
from headrace_gateway.intake import Goal, Intake, TierGoals
from headrace_gateway.limiter_outage import OutageProofLimiter
from headrace_gateway.listener import listening_socket
from headrace_gateway.messages_api.count_tokens import CountDialect, TokenCount
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.model_directory import ModelDirectory
from headrace_gateway.model_routes.model_names import ModelNames
from headrace_gateway.model_routes.route_watch import RouteWatch
from headrace_gateway.moderations import Moderations
from headrace_gateway.openai_dialect import OpenAiErrors
from headrace_gateway.outbox_metrics import OutboxMetrics
from headrace_gateway.price_watch import PriceWatch
from headrace_gateway.pricing import PriceBook
from headrace_gateway.request_flow import FlowLimits, RequestFlow
from headrace_gateway.responses_api.api import ResponsesApi
from headrace_gateway.rest_app import rest_app
from headrace_gateway.retry_budget import RetryBudget, RetryLimits
from headrace_gateway.routes.health import health_router
from headrace_gateway.routes.model_routes import model_routes_router
from headrace_gateway.routes.models import models_router
from headrace_gateway.routes.requests import requests_router
from headrace_gateway.routes.usage import usage_router
from headrace_gateway.sent_reports import SentReports
from headrace_gateway.settings import GatewaySettings
from headrace_gateway.state.idempotency_records import IdempotencyRecords
from headrace_gateway.state.store import StateStore
from headrace_gateway.stories import Stories
from headrace_gateway.tokenize_api import TokenizeApi
from headrace_gateway.usage_events import UsageLog
from headrace_gateway.usage_log import OutboxUsageLog

_log = logging.getLogger(__name__)
_REPORTS_FLUSH_S = 1.0

# After the drain, requests whose clients have left get so long to finish.
_LAST_WORDS_S = 5.0


class Gateway:
    """The service. `start`, then `run` until the lifecycle says stop, then it has drained.

    Args:
        settings: where things are.
        lifecycle: says when to stop.
        clock: time.
        usage_log: where usage goes; by default the outbox and relay of the settings.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        lifecycle: Lifecycle,
        clock: Clock | None = None,
        usage_log: UsageLog | None = None,
    ) -> None:
        self._settings, self._lifecycle = settings, lifecycle
        clock = clock or SystemClock()
        self.registry = new_registry()
        self.metrics = GatewayMetrics(self.registry)
        self._router = RouterClient(settings.router_address)
        self._workers = WorkerSessions()
        self._guard = GuardClient(
            settings.guard_address, settings.guard_timeout_s, settings.guard_wait_s
        )
        self._limiter = RateLimitClient(settings.ratelimit_address, settings.admit_timeout_s)
        share = LocalShare(settings.num_replicas, settings.overdraft_ratio, clock)
        self._limits = OutageProofLimiter(self._limiter, share, self.metrics)
        self._billing = BillingClient(settings.billing_address)
        self.directory = ModelDirectory(self._router, self._workers)
        self.routes = RouteWatch(settings.model_routes_file, self.metrics)
        self._names = ModelNames(self.directory, self.routes)
        self._prices = PriceWatch(self._billing, PriceBook())
        self._auth = KeyAuth(self._billing, clock, self.metrics, self._prices.on_change)
        self._admission = Admission(self._limits, self.metrics)
        self._intake = Intake(settings.default_max_tokens, self.metrics.prompts_encoding.set)
        self._usage_log: UsageLog = usage_log or OutboxUsageLog.build(
            settings.outbox_dir,
            settings.kafka_bootstrap,
            settings.billing_address,
            clock,
            OutboxMetrics(self.registry),
            topic_replicas=settings.kafka_topic_replicas,
            num_seats=settings.outbox_seats,
        )
        watch_disk(self.registry, {"outbox": settings.outbox_dir})
        self._state = StateStore(settings.state_location(), clock)
        self._sent_reports = SentReports(self._guard, self.metrics)
        self._call_rate = CallRate(settings.calls_per_s, clock)
        self._idempotency = Idempotency(
            IdempotencyRecords(self._state, settings.idempotency_ttl_s),
            settings.idempotency_wait_s,
            self._call_rate,
        )
        self.stories = Stories(self._state, settings.story_ttl_s)
        self._flow = self._build_flow(clock)
        self._responses_api = ResponsesApi(
            self._state, settings.response_ttl_s, self._flow, self._auth, self._may_take_over
        )
        self._batch_api = self._build_batch_api()
        self._succession = Succession(settings.succession_fd)
        self._server = HttpServer(
            self._build_app(clock),
            listening_socket(settings.listen, settings.listen_fd, shares=settings.shares_port),
            settings.drain_grace_s,
        )
        self._observability: ObservabilityServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        """The public API's port."""
        return self._server.port

    @property
    def is_ready(self) -> bool:
        """Whether requests would be served now. May be read from any thread."""
        return (
            self._lifecycle.is_ready
            and self.directory.is_ready
            and self._prices.book.is_loaded
            and not self._usage_log.is_full
        )

    def _may_take_over(self) -> bool:
        return self.is_ready and not self.directory.is_starting

    async def run(self) -> None:
        """Start everything, serve until told to stop, drain.

        Raises:
            SettingsError: the state's database can never serve.
        """
        await self._state.check()
        await self._usage_log.start()
        host, port = split_address(self._settings.metrics_listen)
        self._observability = ObservabilityServer(host, port, self.registry, lambda: self.is_ready)
        self._tasks = [
            asyncio.create_task(supervise(name, body))
            for name, body in (
                ("replica list", self.directory.watch),
                ("key changes", self._auth.watch),
                ("prices", self._prices.keep),
                ("model routes", self.routes.run),
                ("leases", self._admission.renew_all),
                ("state", self._state.keep),
                ("batches", self._batch_api.runner.keep),
                ("background responses", self._responses_api.takeover.keep),
                ("background events", self._responses_api.background.keep_events),
                ("stories", self.stories.keep),
                ("guard reports", self._sent_reports.run),
            )
        ]
        self._lifecycle.set_ready(True)
        serving = asyncio.create_task(self._server.serve())
        stopping = asyncio.create_task(self._lifecycle.stopping.wait())
        _log.info("listening on %s (port %d)", self._settings.listen, self.port)
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._lifecycle.stopping.is_set():
                await self._succession.until_served(self._observability)
        finally:
            self._server.stop()
            cut_s = time.monotonic() + self._settings.drain_grace_s
            await asyncio.gather(serving, return_exceptions=True)
            stopping.cancel()
            await self._responses_api.background.close(cut_s - time.monotonic())
            await self._close()

    def _build_flow(self, clock: Clock) -> RequestFlow:
        settings = self._settings
        return RequestFlow(
            names=self._names,
            intake=self._intake,
            input_guard=InputGuard(self._guard, self.metrics, settings.guard_wait_s),
            output_guard=self._guard,
            sent_reports=self._sent_reports,
            admission=self._admission,
            generator=Generator(
                self._router,
                self._workers,
                self.directory,
                clock,
                self.metrics,
                RetryBudget(
                    RetryLimits(
                        settings.retry_ratio, settings.retry_floor_per_s, settings.retry_burst
                    ),
                    clock,
                    random.random,
                ),
                settings.max_attempts,
                settings.replica_wait_s,
            ),
            usage_log=self._usage_log,
            prices=self._prices.book,
            clock=clock,
            metrics=self.metrics,
            limits=FlowLimits(
                settings.request_timeout_s,
                settings.keep_alive_s,
                settings.silent_start_s,
                TierGoals(
                    Goal(settings.ttft_slo_priority_ms, settings.tpot_slo_priority_ms),
                    Goal(settings.ttft_slo_standard_ms, settings.tpot_slo_standard_ms),
                    Goal(settings.ttft_slo_flex_ms),
                ),
            ),
            closings=Closings(self.metrics),
            stories=self.stories,
        )

    def _build_batch_api(self) -> BatchApi:
        settings = self._settings
        limits = FileLimits(
            settings.file_max_bytes, settings.project_file_bytes, settings.file_ttl_s
        )
        return BatchApi(
            self._state,
            limits,
            self._flow,
            self._auth,
            self._call_rate,
            self.directory,
            settings.batch_concurrency,
        )

    def _build_app(self, clock: Clock) -> AsgiApp:
        limits = HttpLimits(self._settings.max_body_bytes, self._settings.slow_reader_s)
        context = RouteContext(
            self._auth,
            limits,
            clock,
            self.metrics,
            self._admission.standing,
            self._idempotency,
        )
        hot: dict[str, AsgiApp] = {
            **{
                path: HotRoute(dialect, context, self._flow)
                for path, dialect in self._batch_api.dialects.items()
            },
            **self._responses_api.posts(context),
        }
        hot["/v1/messages/count_tokens"] = CallRoute(
            CountDialect(), context, TokenCount(self._names, self._intake, self._admission)
        )
        tokens = TokenizeApi(self._names, self._intake, self._admission)
        tokenize_form = OpenAiErrors(Endpoint.TOKENIZE)
        hot["/tokenize"] = CallRoute(tokenize_form, context, tokens.tokenize)
        hot["/detokenize"] = CallRoute(tokenize_form, context, tokens.detokenize)
        moderations = Moderations(self._guard, self._admission)
        hot["/v1/moderations"] = CallRoute(OpenAiErrors(Endpoint.MODERATIONS), context, moderations)
        posts = self._batch_api.posts(context)
        rest = rest_app(
            [
                models_router(self._auth, self._names),
                model_routes_router(self._auth, self.routes),
                usage_router(self._auth, self._billing, clock),
                self._responses_api.router(),
                requests_router(self._auth, self.stories, self._billing, self._router),
                *self._batch_api.routers(),
                health_router(self.registry, lambda: self.is_ready),
            ],
            posts,
            self._auth,
            self._call_rate,
            clock,
        )
        app = GatewayApp(hot, posts, rest)
        origins = self._settings.allowed_origins()
        return CrossOrigin(app, origins) if origins else app

    async def _close(self) -> None:
        await self._idempotency.close(_LAST_WORDS_S)
        await self._flow.closings.drain()
        await cancel_and_wait(*self._tasks)
        await self._sent_reports.flush(_REPORTS_FLUSH_S)
        await self._usage_log.close()
        await self.stories.close()
        await self._state.close()
        await self._admission.close()
        await self._limits.close()
        await self.directory.close()
        self._intake.close()
        for client in (self._workers, self._router, self._guard, self._limiter, self._billing):
            await client.close()
        self._succession.close()
        if self._observability is not None:
            self._observability.close()
