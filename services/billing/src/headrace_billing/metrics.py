"""All metrics of billing."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace_billing.bookkeeper import BatchResult
from headrace_common.metrics import LATENCY_BUCKETS_S
from headrace_contracts.billing.v1 import billing_pb2 as pb


class BillingMetrics:
    """Collectors of the billing service, made in the given registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.events_booked = Counter(
            "headrace_billing_events_booked",
            "Events booked for the first time, by kind (opened, closed) and source (log, sweeper).",
            ["kind", "source"],
            registry=registry,
        )
        self.duplicates = Counter(
            "headrace_billing_duplicate_events",
            "Events that were booked before; delivered again, they change nothing.",
            registry=registry,
        )
        self.dead_letters = Counter(
            "headrace_billing_dead_letters",
            "Messages that can never be booked, kept for a person to look at.",
            registry=registry,
        )
        self.amount_mismatches = Counter(
            "headrace_billing_amount_mismatches",
            "Requests for which the gateway computed another amount than the ledger.",
            registry=registry,
        )
        self.late_closes = Counter(
            "headrace_billing_late_closes",
            "Real closes that came after the request had been closed without one.",
            registry=registry,
        )
        self.log_restarts = Counter(
            "headrace_billing_log_restarts",
            "Partitions that were found to have begun anew and are read from their beginning.",
            registry=registry,
        )
        self.failures = Counter(
            "headrace_billing_failures",
            "Failures that are tried again, by part (database, consumer, sweeper, exporter, ...).",
            ["part"],
            registry=registry,
        )
        # A series that begins at its first event has no rate at that event. Those of the other
        # parts begin when the part is started.
        self.failures.labels("database")
        self.consumer_lag_messages = Gauge(
            "headrace_billing_consumer_lag_messages",
            "Messages in the log that are not booked yet; NaN while the broker cannot be asked.",
            registry=registry,
        )
        self.open_requests = Gauge(
            "headrace_billing_open_requests",
            "Requests that were opened and not closed.",
            registry=registry,
        )
        self._add_export(registry)
        self._add_reconciliation(registry)
        self.batch_duration_s = Histogram(
            "headrace_billing_batch_duration_seconds",
            "Time to book one batch, its commit included.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.consumer_lag_messages.set(float("nan"))

    def _add_export(self, registry: CollectorRegistry) -> None:
        self.exported = Counter(
            "headrace_billing_exported_requests",
            "Closed requests that a metering service has acknowledged.",
            registry=registry,
        )
        self.export_waiting = Gauge(
            "headrace_billing_export_waiting_requests",
            "Closed requests that no metering service has acknowledged yet; 0 without an exporter.",
            registry=registry,
        )

        self.export_refused = Gauge(
            "headrace_billing_export_refused_requests",
            "Of those, requests that the metering service refuses; tried again once an hour.",
            registry=registry,
        )

    def _add_reconciliation(self, registry: CollectorRegistry) -> None:
        self.reconcile_missing = Gauge(
            "headrace_billing_reconcile_missing",
            "What the last reconciliation missed in the books: events of the log, requests that "
            "workers counted.",
            ["of"],
            registry=registry,
        )
        self.reconcile_differs = Gauge(
            "headrace_billing_reconcile_differing_requests",
            "Requests that the last reconciliation found booked with other counts than workers'.",
            registry=registry,
        )
        self.reconciled_unix_s = Gauge(
            "headrace_billing_reconciled_timestamp_seconds",
            "When this process last compared log, workers and books whole; 0 = not yet.",
            registry=registry,
        )
        for of in ("log", "workers"):
            self.reconcile_missing.labels(of)

    def reconciled(self, answer: pb.ReconcileResponse, unix_s: float) -> None:
        """Show what a reconciliation found."""
        self.reconcile_missing.labels("workers").set(answer.num_witness_missing)
        self.reconcile_differs.set(answer.num_witness_differs)
        if answer.log_was_read:
            self.reconcile_missing.labels("log").set(answer.num_log_missing)
            self.reconciled_unix_s.set(unix_s)

    def count(self, result: BatchResult, source: str) -> None:
        """Add what came of a batch."""
        self.events_booked.labels("opened", source).inc(result.opened)
        self.events_booked.labels("closed", source).inc(result.closed)
        self.duplicates.inc(result.duplicates)
        self.dead_letters.inc(result.dead_letters)
        self.amount_mismatches.inc(result.mismatches)
        self.late_closes.inc(result.late_closes)
