"""All collectors of the gateway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from headrace_common.errors import QueueFull, ReplicaDraining, ReplicaLost, Unavailable
from headrace_common.loop_metrics import Count, LoopCounter, LoopHistogram
from headrace_common.metrics import LATENCY_BUCKETS_S

STAGES = ("tokenise", "guard", "admit", "pick", "close")
# What a request may have to do without.
DEPENDENCIES = ("billing", "guard", "outbox", "ratelimit", "router")
# Why an attempt is taken to another replica.
RESUMED = (QueueFull, ReplicaDraining, ReplicaLost, Unavailable)


class GatewayMetrics:
    """What the gateway counts. No label value ever comes from a client."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = LoopCounter(
            "headrace_gateway_requests",
            "Requests that ended, by endpoint and outcome: ok, output_blocked or a reason.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        # One loop writes it: a gauge of the library's would take a lock each time.
        self.running = Count()
        Gauge(
            "headrace_gateway_running_requests",
            "Requests being served on the generating endpoints.",
            registry=registry,
        ).set_function(lambda: self.running.value)
        self.prompts_encoding = Gauge(
            "headrace_gateway_prompts_encoding",
            "Long prompts that are being encoded or wait for a thread.",
            registry=registry,
        )
        self.ttft_s = LoopHistogram(
            "headrace_gateway_ttft_seconds",
            "Request fully read to first token written (way=stream) or known (way=whole: all are).",
            ["endpoint", "way"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.tpot_s = LoopHistogram(
            "headrace_gateway_tpot_seconds",
            "Time per output token after the first, one value a stream of one choice.",
            ["endpoint"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.duration_s = LoopHistogram(
            "headrace_gateway_duration_seconds",
            "Request fully read to last byte written.",
            ["endpoint"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        stage_s = LoopHistogram(
            "headrace_gateway_stage_seconds",
            "Time per stage of a request.",
            ["stage"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.stages_s = {name: stage_s.labels(name) for name in STAGES}
        self._make_counters(registry)
        self._make_outage_metrics(registry)
        self._begin_with_zeros()

    def _begin_with_zeros(self) -> None:
        # A series that begins at its first event has no rate at that event.
        for dependency in DEPENDENCIES:
            self.degraded.labels(dependency)
        for error in RESUMED:
            self.resumes.labels(error.reason)
        for outcome in ("made", "refused"):
            self.retries.labels(outcome)
        self.route_reloads.labels("refused")

    def _make_outage_metrics(self, registry: CollectorRegistry) -> None:
        self.limiter_away = Gauge(
            "headrace_gateway_limiter_away",
            "1 while the rate limiter does not answer and this gateway's own share decides.",
            registry=registry,
        )
        self.owed_settlements = Gauge(
            "headrace_gateway_owed_settlements",
            "Settlements in memory that wait for the rate limiter.",
            registry=registry,
        )
        self.dropped_settlements = Counter(
            "headrace_gateway_dropped_settlements",
            "Settlements given up because too many waited; the ledger still has them.",
            registry=registry,
        )

    def _make_counters(self, registry: CollectorRegistry) -> None:
        tokens = LoopCounter(
            "headrace_gateway_tokens",
            "Tokens of closed requests, by kind: prompt (cached included), cached, output.",
            ["kind"],
            registry=registry,
        )
        self.prompt_tokens, self.cached_tokens, self.output_tokens = (
            tokens.labels(kind) for kind in ("prompt", "cached", "output")
        )
        self.resumes = LoopCounter(
            "headrace_gateway_resumes",
            "Attempts given up on a replica and taken to another, by the reason of the failure.",
            ["reason"],
            registry=registry,
        )
        self.retries = LoopCounter(
            "headrace_gateway_retries",
            "Further attempts at a first token, by outcome: made, or refused by the budget.",
            ["outcome"],
            registry=registry,
        )
        self.degraded = LoopCounter(
            "headrace_gateway_degraded",
            "Requests (or parts) served without an answer of the named dependency.",
            ["dependency"],
            registry=registry,
        )
        self.sent_reports_dropped = Counter(
            "headrace_gateway_sent_reports_dropped",
            "Reports of sent text that the guard never got.",
            registry=registry,
        )
        self.key_lookups = LoopCounter(
            "headrace_gateway_key_lookups",
            "Key checks by where the answer came from: cache, refused_cache, billing, stale.",
            ["source"],
            registry=registry,
        )
        self.route_reloads = LoopCounter(
            "headrace_gateway_route_reloads",
            "Looks at a changed file of model routes, by outcome: taken, unchanged, refused.",
            ["outcome"],
            registry=registry,
        )
        self.fallbacks = LoopCounter(
            "headrace_gateway_model_fallbacks",
            "Requests taken to another model before the first byte, by the reason of the failure.",
            ["reason"],
            registry=registry,
        )
        self.taken_over = Counter(
            "headrace_gateway_responses_taken_over",
            "Background responses begun anew here, since whoever made them died or stopped.",
            registry=registry,
        )
        self.unpriced = Counter(
            "headrace_gateway_unpriced_requests",
            "Admitted requests for a model that no price row covers.",
            registry=registry,
        )
