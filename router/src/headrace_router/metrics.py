"""What the router counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace_common.errors import Deadline, NoReplica, QueueFull
from headrace_common.metrics import LATENCY_BUCKETS_S
from headrace_router.breaker import CLOSED, HALF_OPEN, OPEN

_DECISION_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1)


class RouterMetrics:
    """Collectors of the router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._make_pick_collectors(registry)
        self._make_breaker_collectors(registry)
        self._make_policy_collectors(registry)
        self._make_index_collectors(registry)
        self._make_peer_collectors(registry)
        self.replicas = Gauge(
            "headrace_router_replicas",
            "Replicas by whether they may get requests.",
            ["state"],
            registry=registry,
        )
        self.ready_replicas = Gauge(
            "headrace_router_model_ready_replicas",
            "Replicas that may get requests for a model; a model once seen stays, with 0.",
            ["model"],
            registry=registry,
        )
        self.watch_failures = Counter(
            "headrace_router_watch_failures",
            "Connections to workers that broke or could not be made.",
            registry=registry,
        )

    def _make_pick_collectors(self, registry: CollectorRegistry) -> None:
        self.decisions = Counter(
            "headrace_router_decisions",
            "Replicas picked, by policy.",
            ["policy"],
            registry=registry,
        )
        self.refusals = Counter(
            "headrace_router_refusals",
            "Requests that got no replica, by reason.",
            ["reason"],
            registry=registry,
        )
        # Zeros from the start: a series that begins at its first event has no rate at that event.
        for refusal in (QueueFull, NoReplica, Deadline):
            self.refusals.labels(refusal.reason)
        self.decision_s = Histogram(
            "headrace_router_decision_seconds",
            "Time to evaluate one request against all replicas.",
            buckets=_DECISION_BUCKETS_S,
            registry=registry,
        )
        self.queue_s = Histogram(
            "headrace_router_queue_seconds",
            "Time that requests waited in the router.",
            buckets=(0.0, *LATENCY_BUCKETS_S),
            registry=registry,
        )
        self.waiting = Gauge(
            "headrace_router_waiting_requests", "Requests in the queues.", registry=registry
        )
        self.in_flight = Gauge(
            "headrace_router_in_flight_requests",
            "Requests picked and not yet ended.",
            registry=registry,
        )
        self.predicted_tokens = Counter(
            "headrace_router_predicted_cached_tokens",
            "Prompt tokens expected to be cached, of requests with a first token.",
            registry=registry,
        )
        self.cached_tokens = Counter(
            "headrace_router_actual_cached_tokens",
            "Prompt tokens that the worker really reused, of the same requests.",
            registry=registry,
        )
        self.ttft_error_ratio = Histogram(
            "headrace_router_ttft_error_ratio",
            "Observed / predicted time to first token.",
            buckets=(0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.5, 2.0, 4.0, 10.0),
            registry=registry,
        )

    def _make_breaker_collectors(self, registry: CollectorRegistry) -> None:
        self.breaker_changes = Counter(
            "headrace_router_breaker_changes",
            "Breakers of replicas that went to a state: open, half_open, closed.",
            ["state"],
            registry=registry,
        )
        for state in (OPEN, HALF_OPEN, CLOSED):
            self.breaker_changes.labels(state)
        self.broken_replicas = Gauge(
            "headrace_router_broken_replicas",
            "Replicas whose breaker is open: they get no requests but a probe now and then.",
            registry=registry,
        )

    def _make_policy_collectors(self, registry: CollectorRegistry) -> None:
        self.pairs = Counter(
            "headrace_router_pairs",
            "Decisions by who computes the prompt: direct (who decodes), pair (a prefill replica).",
            ["way"],
            registry=registry,
        )
        self.shadow_decisions = Counter(
            "headrace_router_shadow_decisions",
            "Decisions that the shadow policy was asked about, by what it would have done.",
            ["policy", "result"],
            registry=registry,
        )
        self.shadow_gain_s = Histogram(
            "headrace_router_shadow_gain_seconds",
            "Predicted time to first token at the chosen replica less that at the shadow's.",
            buckets=(-10.0, -1.0, -0.1, -0.01, 0.0, 0.01, 0.1, 1.0, 10.0),
            registry=registry,
        )
        self.policy_reloads = Counter(
            "headrace_router_policy_reloads",
            "Times that the policy file changed, by whether it was taken up.",
            ["result"],
            registry=registry,
        )
        self.policy_reloads.labels("refused")

    def _make_peer_collectors(self, registry: CollectorRegistry) -> None:
        self.peer_routers = Gauge(
            "headrace_router_peer_routers",
            "Other routers whose bookings are heard.",
            registry=registry,
        )
        self.peer_bookings = Gauge(
            "headrace_router_peer_bookings",
            "Requests that other routers have under way.",
            registry=registry,
        )
        self.peer_failures = Counter(
            "headrace_router_peer_failures",
            "Times that bookings could not be exchanged; each router then counts its own alone.",
            registry=registry,
        )

    def _make_index_collectors(self, registry: CollectorRegistry) -> None:
        self.index_entries = Gauge(
            "headrace_router_index_entries", "Block hashes in the mirror.", registry=registry
        )
        self.index_warm = Gauge(
            "headrace_router_index_warm",
            "1 once the mirror has been read whole; 0 again while Redis's data is lost.",
            registry=registry,
        )
        self.index_warm_up_s = Gauge(
            "headrace_router_index_warm_up_seconds",
            "Time from the start to the index read whole; decisions go on meanwhile.",
            registry=registry,
        )
        self.index_bytes = Gauge(
            "headrace_router_index_bytes",
            "Memory of the mirror's entries at most; bounded by the setting index_max_bytes.",
            registry=registry,
        )
        self.index_evicted = Gauge(
            "headrace_router_index_evicted_entries",
            "Entries that left the mirror to keep its bound, since the start.",
            registry=registry,
        )
        self.index_staleness_s = Gauge(
            "headrace_router_index_staleness_seconds",
            "Time since the mirror last heard of Redis.",
            registry=registry,
        )
        self.index_failures = Counter(
            "headrace_router_index_failures",
            "Times that Redis could not be read; the mirror goes on with what it has.",
            registry=registry,
        )
        self.index_rescans = Counter(
            "headrace_router_index_rescans",
            "Replicas read again from their sets, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in ("start", "unknown", "gap", "reset", "malformed", "drift"):
            self.index_rescans.labels(reason)
