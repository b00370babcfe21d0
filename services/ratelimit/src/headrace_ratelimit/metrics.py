"""The rate limiter's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_STORE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)


class RateLimitMetrics:
    """All collectors of the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = Counter(
            "headrace_ratelimit_decisions",
            "Admissions by outcome and, for denials, binding dimension; degraded = without Redis.",
            ["outcome", "dimension", "degraded"],
            registry=registry,
        )
        self.degraded = Gauge(
            "headrace_ratelimit_degraded",
            "1 while Redis does not answer and the local share decides.",
            registry=registry,
        )
        self.store_failures = Counter(
            "headrace_ratelimit_store_failures",
            "Times that Redis did not answer, or not in time.",
            registry=registry,
        )
        self.store_duration_s = Histogram(
            "headrace_ratelimit_store_duration_seconds",
            "Time of one pipelined batch at Redis.",
            buckets=_STORE_BUCKETS_S,
            registry=registry,
        )
        self.batch_calls = Histogram(
            "headrace_ratelimit_batch_calls",
            "Script calls in one batch.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=registry,
        )
        self.kept_settlements = Gauge(
            "headrace_ratelimit_kept_settlements",
            "Settlements in memory that wait for Redis.",
            registry=registry,
        )
        self.dropped_settlements = Counter(
            "headrace_ratelimit_dropped_settlements",
            "Settlements given up because too many waited; the ledger still has them.",
            registry=registry,
        )
        self.rebuilt_budgets = Counter(
            "headrace_ratelimit_rebuilt_budgets",
            "Windows of budgets that Redis did not have and the ledger brought back.",
            registry=registry,
        )
        self.budget_drift_nano_usd = Gauge(
            "headrace_ratelimit_budget_drift_nano_usd",
            "Largest amount that the ledger had and Redis lacked, at the last comparison.",
            registry=registry,
        )
        self.ledger_failures = Counter(
            "headrace_ratelimit_ledger_failures",
            "Times that the ledger did not say what a budget has spent.",
            registry=registry,
        )
