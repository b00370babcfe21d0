"""The outbox's and the relay's metrics, made once per process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class OutboxMetrics:
    """What an operator watches of the outbox and its relay."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pending_events = Gauge(
            "headrace_gateway_outbox_pending_events",
            "Events on disk that the broker has not acknowledged.",
            registry=registry,
        )
        self.pending_bytes = Gauge(
            "headrace_gateway_outbox_pending_bytes",
            "Bytes of segments that the ledger has not confirmed.",
            registry=registry,
        )
        self.limit_bytes = Gauge(
            "headrace_gateway_outbox_limit_bytes",
            "Pending bytes from which new requests are refused.",
            registry=registry,
        )
        self.oldest_age_s = Gauge(
            "headrace_gateway_outbox_oldest_age_seconds",
            "Age of the oldest event that the broker has not acknowledged; 0 = none waits.",
            registry=registry,
        )
        self.torn_bytes = Counter(
            "headrace_gateway_outbox_torn_bytes",
            "Bytes cut off at start because a crash had torn the last write.",
            registry=registry,
        )
        self.write_failures = Counter(
            "headrace_gateway_outbox_write_failures",
            "Group commits that the disk refused.",
            registry=registry,
        )
        self.relay_failures = Counter(
            "headrace_gateway_outbox_relay_failures",
            "Tries to reach the broker or billing that failed.",
            registry=registry,
        )
        self.produced_again = Counter(
            "headrace_gateway_outbox_produced_again",
            "Events that the broker had acknowledged and the ledger never got.",
            registry=registry,
        )
        self.swept = Counter(
            "headrace_gateway_outbox_swept",
            "Requests that a dead process had left open, closed at start.",
            registry=registry,
        )

    def of_another(self) -> OutboxMetrics:
        """Return metrics for a further outbox: it counts with this one, its gauges show nowhere."""
        other = OutboxMetrics(CollectorRegistry())
        other.torn_bytes, other.write_failures = self.torn_bytes, self.write_failures
        other.relay_failures, other.produced_again = self.relay_failures, self.produced_again
        other.swept = self.swept
        return other
