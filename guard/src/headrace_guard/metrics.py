"""The guard's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace_guard.policy import Direction
from headrace_guard.reconcile import Leak
from headrace_guard.verdict import Reason

_DURATION_BUCKETS_S = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip
_HELD_BUCKETS_CHARS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16_384)


class GuardMetrics:
    """All collectors of the guard."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.verdicts = Counter(
            "headrace_guard_verdicts",
            "Verdicts by direction (input, output), state and action.",
            ["direction", "state", "action"],
            registry=registry,
        )
        self.findings = Counter(
            "headrace_guard_findings",
            "Findings by direction, category and action.",
            ["direction", "category", "action"],
            registry=registry,
        )
        self.not_evaluated = Counter(
            "headrace_guard_not_evaluated",
            "Judgements that could not be made, by direction and reason.",
            ["direction", "reason"],
            registry=registry,
        )
        self.fail_open = Counter(
            "headrace_guard_fail_open",
            "Texts that passed without being judged because their policy fails open.",
            ["direction"],
            registry=registry,
        )
        self.duration_s = Histogram(
            "headrace_guard_check_duration_seconds",
            "Time from a message's arrival to its answer.",
            ["direction"],
            buckets=_DURATION_BUCKETS_S,
            registry=registry,
        )
        self.held_chars = Histogram(
            "headrace_guard_held_chars",
            "Output characters held back after each piece of text.",
            buckets=_HELD_BUCKETS_CHARS,
            registry=registry,
        )
        self.scanned_chars = Counter(
            "headrace_guard_scanned_chars",
            "Characters judged, by direction.",
            ["direction"],
            registry=registry,
        )
        self.long_texts_waiting = Gauge(
            "headrace_guard_long_texts_waiting",
            "Long texts that run in or wait for a thread.",
            registry=registry,
        )
        self.embeddings_waiting = Gauge(
            "headrace_guard_embeddings_waiting",
            "Texts that are being embedded or wait for that.",
            registry=registry,
        )
        self._add_upkeep(registry)
        self._begin_with_zeros()
        self.audit = AuditMetrics(registry)

    def _begin_with_zeros(self) -> None:
        # A series that begins at its first event has no rate at that event.
        for direction in Direction:
            self.fail_open.labels(direction.value)
            for reason in Reason:
                self.not_evaluated.labels(direction.value, reason.name.lower())

    def _add_upkeep(self, registry: CollectorRegistry) -> None:
        self.cached_parts = Counter(
            "headrace_guard_cached_parts",
            "Parts of requests by whether their result was kept from before (hit, miss).",
            ["result"],
            registry=registry,
        )
        self.policy_reloads = Counter(
            "headrace_guard_policy_reloads",
            "Readings of policies from disk, by result (applied, refused).",
            ["result"],
            registry=registry,
        )
        self.policy_reloads.labels("refused")


class AuditMetrics:
    """Collectors of the audit."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.records = Counter(
            "headrace_guard_audit_records", "Audit records written.", registry=registry
        )
        self.dropped = Counter(
            "headrace_guard_audit_dropped",
            "Audit records lost because too many waited to be written.",
            registry=registry,
        )
        self.waiting = Gauge(
            "headrace_guard_audit_waiting", "Audit records not yet written.", registry=registry
        )
        self.unpublished = Gauge(
            "headrace_guard_audit_unpublished",
            "Audit records that Kafka has not taken yet, as of the last look.",
            registry=registry,
        )
        self.unscanned = Counter(
            "headrace_guard_released_unscanned",
            "Requests of which more characters went out than the guard scanned and released: "
            "leak = nobody allowed it, fail_open = the key is fail-open, guard_lost = the guard's "
            "own record was lost, mostly with it.",
            ["kind"],
            registry=registry,
        )
        for leak in Leak:
            self.unscanned.labels(leak.value)
