"""Composition root: builds the servicers, serves, drains."""

from __future__ import annotations

import asyncio
import logging

from headrace_common.clock import Clock, SystemClock
from headrace_common.lifecycle import Lifecycle, cancel_and_wait, serve, supervise
from headrace_common.metrics import ObservabilityServer, RpcMetrics, new_registry, watch_disk
from headrace_common.rpc_server import RpcServer
from headrace_common.settings import split_address
from headrace_common.succession import Succession, inherited_listener
from headrace_contracts.guard.v1 import guard_pb2
from headrace_guard.admin_servicer import GuardAdminServicer
from headrace_guard.audit_journal import AuditJournal
from headrace_guard.audit_log import AuditLog
from headrace_guard.audit_record import RecordMaker
from headrace_guard.classifiers.blocklist import BlocklistCache
from headrace_guard.classifiers.setup import judge_of, load_models
from headrace_guard.classifiers.text_model import TextModels
from headrace_guard.cpu_pool import CpuPool
from headrace_guard.input_judge import InputJudge
from headrace_guard.metrics import GuardMetrics
from headrace_guard.moderation import Moderator
from headrace_guard.plan import Planner
from headrace_guard.policy_book import PolicyBook
from headrace_guard.policy_store import PolicyStore
from headrace_guard.servicer import GuardServicer, Limits, Tools
from headrace_guard.settings import GuardSettings
from headrace_guard.verdict_cache import VerdictCache

_log = logging.getLogger(__name__)
DESCRIPTOR = guard_pb2.DESCRIPTOR.services_by_name["Guard"]
ADMIN_DESCRIPTOR = guard_pb2.DESCRIPTOR.services_by_name["GuardAdmin"]
_AUDIT_FILE = "audit.sqlite3"


class GuardApp:
    """One guard process. `start` serves, `stop` drains.

    Args:
        settings: where and how much.
        models: trained classifiers; None = the packaged ones.
        clock: time.

    Raises:
        PolicyError: the policies are wrong.
        ArtefactError: the packaged models cannot be used.
    """

    def __init__(
        self, settings: GuardSettings, models: TextModels | None = None, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        self.lifecycle = Lifecycle()
        self._settings = settings
        self._registry = new_registry()
        metrics = GuardMetrics(self._registry)
        self._pool = CpuPool(
            settings.num_threads, settings.max_waiting_texts, metrics.long_texts_waiting
        )
        self._embed_thread = CpuPool(1, settings.max_waiting_embeddings, metrics.embeddings_waiting)
        self._judge = judge_of(settings)
        models = models or load_models(
            settings.embedding_dir, self._pool, self._embed_thread, self._judge
        )
        store = PolicyStore(settings.policy_file, settings.policy_dir)
        policies = store.load()
        planner = Planner(
            policies.by_name,
            BlocklistCache(
                settings.cached_blocklists,
                settings.max_blocklist_terms,
                settings.max_blocklist_chars,
            ),
        )
        self.book = PolicyBook(store, policies, planner, metrics)
        if settings.audit_dir is not None:
            watch_disk(self._registry, {"audit": settings.audit_dir})
        journal = _journal(settings)
        self.audit = AuditLog(
            journal,
            clock,
            metrics.audit,
            kafka_bootstrap=settings.kafka_bootstrap,
            topic_replicas=settings.kafka_topic_replicas,
            max_waiting=settings.audit_max_waiting,
            sent_grace_s=settings.sent_grace_s,
        )
        limits = Limits(settings.check_budget_s, settings.max_input_chars, settings.max_held_chars)
        tools = Tools(
            planner,
            _input_judge(settings, self._pool, models, metrics),
            Moderator(models, self._pool),
            models,
            self._pool,
            self.audit,
            RecordMaker(journal.span_key),
        )
        self._rpc = RpcServer(
            settings.listen,
            [
                (DESCRIPTOR, GuardServicer(tools, limits, clock, metrics)),
                (ADMIN_DESCRIPTOR, GuardAdminServicer(self.book, self.audit)),
            ],
            RpcMetrics(self._registry),
            None if settings.listen_fd is None else inherited_listener(settings.listen_fd),
        )
        self._succession = Succession(settings.succession_fd)
        self._observability: ObservabilityServer | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Port that is served."""
        return self._rpc.port

    @property
    def metrics_port(self) -> int:
        """Port of /metrics, /health and /ready; 0 before `start`."""
        return self._observability.port if self._observability else 0

    async def start(self) -> None:
        """Listen and say ready: the guard waits for nobody."""
        host, port = split_address(self._settings.metrics_listen)
        self._observability = ObservabilityServer(
            host, port, self._registry, lambda: self.lifecycle.is_ready
        )
        self.audit.start()
        self._watch = asyncio.create_task(supervise("policies", self._keep_policies))
        await self._rpc.start()
        await self._rpc.set_ready(True)
        self.lifecycle.set_ready(True)
        _log.info("serving on port %d, metrics on port %d", self.port, self.metrics_port)

    async def stop(self) -> None:
        """Let running streams end, leave; gateways ask another guard for what is cut then."""
        self.lifecycle.set_ready(False)
        if self.lifecycle.stopping.is_set():
            await self._succession.until_served(self._observability)
        await self._rpc.stop(self._settings.drain_grace_s, refuses=False)
        await cancel_and_wait(self._watch)
        await self.audit.close()
        self._pool.close()
        self._embed_thread.close()
        if self._judge is not None:
            await self._judge.close()
        self._succession.close()
        if self._observability is not None:
            self._observability.close()

    async def _keep_policies(self) -> None:
        await self.book.keep(self._settings.policy_poll_s)


def _journal(settings: GuardSettings) -> AuditJournal:
    folder = settings.audit_dir
    return AuditJournal(
        folder / _AUDIT_FILE if folder else None,
        settings.audit_max_records,
        is_published=bool(settings.kafka_bootstrap),
    )


def _input_judge(
    settings: GuardSettings, pool: CpuPool, models: TextModels | None, metrics: GuardMetrics
) -> InputJudge:
    def on_cached(num_hits: int, num_misses: int) -> None:
        metrics.cached_parts.labels("hit").inc(num_hits)
        metrics.cached_parts.labels("miss").inc(num_misses)

    cache = VerdictCache(settings.cached_verdicts)
    return InputJudge(pool, models, cache, settings.max_input_chars, on_cached)


async def serve_guard(settings: GuardSettings) -> None:
    """Run a guard until a stop signal.

    Raises:
        PolicyError: the policies are wrong.
    """
    app = GuardApp(settings)
    await serve(app, app.lifecycle)
