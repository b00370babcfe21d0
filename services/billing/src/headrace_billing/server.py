"""Wires billing together: one database, one consumer, one sweeper, five services."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence

from prometheus_client import CollectorRegistry

from headrace_billing import price_file
from headrace_billing.accounts_service import AccountsService
from headrace_billing.admin_http import Servicers, admin_app
from headrace_billing.admin_service import AdminService
from headrace_billing.audit import Stamp
from headrace_billing.books_service import BooksService
from headrace_billing.changes import ChangeFeed
from headrace_billing.consumer import UsageConsumer
from headrace_billing.credit_expiry import CreditExpiry
from headrace_billing.desk import Desk
from headrace_billing.exporter import Exporter, ExportTarget
from headrace_billing.http_listener import HttpListener
from headrace_billing.keys_service import KeysService, LastUsed
from headrace_billing.ledger_service import LedgerService
from headrace_billing.metrics import BillingMetrics
from headrace_billing.policy_names import PolicyNames
from headrace_billing.price_store import seed_prices
from headrace_billing.reconcile import KafkaLog
from headrace_billing.settings import BillingSettings
from headrace_billing.store import Database
from headrace_billing.sweeper import Sweeper
from headrace_common.clock import Clock, SystemClock
from headrace_common.errors import Unavailable
from headrace_common.lifecycle import cancel_and_wait, supervise
from headrace_common.metrics import RpcMetrics
from headrace_common.rpc_server import RpcServer
from headrace_common.settings import split_address
from headrace_contracts.billing.v1.billing_pb2 import DESCRIPTOR, Price


class BillingServer:
    """The service without its process. Not ready while the database is away.

    Args:
        settings: all knobs.
        registry: where metrics are made.
        clock: time.

    Raises:
        PriceFileError: the price file is wrong.
        ValueError: the database URL is not one that can be used.
    """

    def __init__(
        self,
        settings: BillingSettings,
        registry: CollectorRegistry,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        prices = price_file.load_prices(settings.prices_file or price_file.PACKAGED)
        self._clock = clock
        self._metrics = BillingMetrics(registry)
        self._database = Database(settings.database_url.get_secret_value())
        self._feed = ChangeFeed(self._database)
        self._last_used = LastUsed(self._database)
        self._consumer = UsageConsumer(
            settings.kafka_bootstrap,
            self._database,
            clock,
            self._metrics,
            consumer_id=_consumer_id(settings.listen),
            exports=bool(settings.export_url),
            topic_replicas=settings.kafka_topic_replicas,
        )
        self._exporter = self._make_exporter(settings) if settings.export_url else None
        self._sweeper = Sweeper(
            self._database,
            self._consumer.bookkeeper,
            self._consumer.shares.all_caught_up_for_s,
            clock,
            self._metrics,
            grace_s=settings.sweep_grace_s,
            interval_s=settings.sweep_interval_s,
            witness_days=settings.worker_usage_days,
        )
        self._credit_expiry = CreditExpiry(self._database, clock)
        services = DESCRIPTOR.services_by_name
        desk = Desk(self._database, self._feed, clock, settings.idempotency_days)
        self._policies = PolicyNames(settings.guard_address)
        admin, accounts = AdminService(desk, self._policies), AccountsService(desk)
        ledger = LedgerService(self._database)
        books = BooksService(desk, KafkaLog(settings.kafka_bootstrap), self._metrics, clock)
        keys = KeysService(self._database, self._feed, self._last_used, clock)
        self._server = RpcServer(
            settings.listen,
            [
                (services["Keys"], keys),
                (services["Admin"], admin),
                (services["Accounts"], accounts),
                (services["Books"], books),
                (services["Ledger"], ledger),
            ],
            RpcMetrics(registry),
        )
        servicers = Servicers(admin=admin, accounts=accounts, books=books, ledger=ledger)
        self._admin_http = HttpListener(
            admin_app(servicers, keys.resolve_secret), settings.admin_listen
        )
        self._prices: Sequence[Price] = prices
        self._is_migrated = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.is_ready = False

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    @property
    def admin_port(self) -> int:
        """Where the admin API listens."""
        return self._admin_http.port

    async def start(self) -> None:
        """Listen; everything that needs the database or the broker starts in the background.

        Raises:
            OSError: the address cannot be bound.
        """
        await self._server.start()
        self._admin_http.start()
        self._run("database", self._serve_database)
        self._run("consumer", self._consumer.run)
        self._run("sweeper", self._sweeper.run)
        self._run("credit_expiry", self._credit_expiry.run)
        self._run("last_used", self._last_used.run)
        if self._exporter is not None:
            self._run("exporter", self._exporter.run)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, end the loops, write down what is only in memory, close."""
        self.is_ready = False
        # The feed goes first: its watchers would otherwise use up the whole grace.
        await cancel_and_wait(*self._tasks)
        await self._consumer.release()
        await asyncio.gather(self._admin_http.stop(grace_s), self._server.stop(grace_s))
        with contextlib.suppress(Unavailable):
            await self._last_used.flush()
        await self._policies.close()
        await self._database.close()

    def _make_exporter(self, settings: BillingSettings) -> Exporter:
        target = ExportTarget(
            url=settings.export_url,
            dialect=settings.export_dialect,
            token=settings.export_token.get_secret_value(),
            source=settings.export_source,
        )
        return Exporter(self._database, target, self._clock, self._metrics)

    def _run(self, part: str, body: Callable[[], Awaitable[None]]) -> None:
        async def when_migrated() -> None:
            if part != "database":
                await self._is_migrated.wait()
            await body()

        failures = self._metrics.failures.labels(part)
        task = supervise(f"billing {part}", when_migrated, on_failure=failures.inc)
        self._tasks.append(asyncio.create_task(task, name=f"billing-{part}"))

    async def _serve_database(self) -> None:
        """Migrate, seed, then follow changes until the database is lost."""
        by = Stamp(int(self._clock.unix_s()))
        await self._database.migrate()
        await self._database.write(lambda it: seed_prices(it, self._prices, by))
        self._is_migrated.set()
        try:
            await self._feed.run(lambda: self._set_ready(True))
        finally:
            await self._set_ready(False)

    async def _set_ready(self, ready: bool) -> None:
        self.is_ready = ready
        await self._server.set_ready(ready)


def _consumer_id(listen: str) -> str:
    """Name this consumer so that its next life has the same name; "" if it cannot."""
    _, port = split_address(listen)
    return f"{socket.gethostname()}/{listen}" if port else ""
