"""Every metric of a worker."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace_common.metrics import LATENCY_BUCKETS_S
from headrace_worker.engine.load import EngineLoad, StepFacts


class WorkerMetrics:
    """Makes all collectors in *registry*."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"headrace_worker_{name}", text, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"headrace_worker_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                f"headrace_worker_{name}_seconds",
                text,
                buckets=LATENCY_BUCKETS_S,
                registry=registry,
            )

        self.running_requests = gauge("running_requests", "Requests in the batch.")
        self.waiting_requests = gauge("waiting_requests", "Requests that wait to be scheduled.")
        self.kv_used_tokens = gauge("kv_used_tokens", "Tokens' worth of KV blocks in use.")
        self.kv_used_ratio = gauge("kv_used_ratio", "Share of KV blocks in use, 0 to 1.")
        self.kv_capacity_tokens = gauge("kv_capacity_tokens", "Tokens that the KV pool holds.")
        self.load_progress_ratio = gauge("load_progress_ratio", "Share of loading done, 0 to 1.")
        self.stalled_s = gauge("stalled_seconds", "Time without a step while work is pending.")
        self.tokens = counter("tokens", "Tokens computed, by kind: prefill or decode.", ("kind",))
        self.output_tokens = counter("output_tokens", "Output tokens of requests that ended.")
        self.prefix_query_tokens = counter(
            "prefix_query_tokens", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hit_tokens = counter(
            "prefix_hit_tokens", "Prompt tokens found in the prefix cache."
        )
        self.preemptions = counter("preemptions", "Sequences put back for want of blocks.")
        self.step_failures = counter("step_failures", "Engine steps that raised.")
        self.requests = counter(
            "requests",
            "Requests that ended, by outcome: stop, length, abort, failed, refused.",
            ("outcome",),
        )
        # Zeros from the start: a series that begins at its first event has no rate at that event.
        for outcome in ("failed", "refused"):
            self.requests.labels(outcome)
        self.step_duration_s = seconds("step_duration", "Duration of an engine step.")
        self.queue_s = seconds("queue", "Time from accepted to scheduled.")
        self.ttft_s = seconds("ttft", "Time from accepted to the first token, at the worker.")
        self.tpot_s = seconds("tpot", "Time per output token after the first, one value a request.")
        self.constraint_compiles = counter(
            "constraint_compiles",
            "Constraints asked for, by outcome: ok, cached, refused, timeout, busy.",
            ("outcome",),
        )
        self.constraint_compile_s = seconds(
            "constraint_compile", "Time to make a constraint ready that was not kept."
        )
        self.constrained_tokens = counter(
            "constrained_tokens", "Output tokens of requests with a constraint."
        )
        self.kv_batches = counter("kv_event_batches", "Batches of KV events sent.")
        self.kv_snapshots = counter("kv_snapshots", "Snapshots of the prefix cache sent.")
        self.kv_publish_failures = counter(
            "kv_publish_failures", "Times the event stream to the cache-index broke."
        )
        self._make_transfer_collectors(registry)

    def _make_transfer_collectors(self, registry: CollectorRegistry) -> None:
        """Make what tells of exchanges with other services and workers."""
        self.usage_sent = Counter(
            "headrace_worker_usage_records_sent",
            "Usage records that Kafka took.",
            registry=registry,
        )
        self.usage_dropped = Counter(
            "headrace_worker_usage_records_dropped",
            "Usage records dropped because Kafka was away too long.",
            registry=registry,
        )
        self.kv_transfers = Counter(
            "headrace_worker_kv_transfers",
            "Prompts fetched from prefill workers, by outcome: ok, held, partial, no_room, failed.",
            ["outcome"],
            registry=registry,
        )
        self.kv_taken_tokens = Counter(
            "headrace_worker_kv_taken_tokens",
            "Tokens of KV taken from other workers.",
            registry=registry,
        )
        self.kv_sent_tokens = Counter(
            "headrace_worker_kv_sent_tokens",
            "Tokens of KV sent to other workers.",
            registry=registry,
        )
        self.kv_transfer_s = Histogram(
            "headrace_worker_kv_transfer_seconds",
            "Time of a transfer, the prefill included.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )

    def watch(
        self, load: Callable[[], EngineLoad], stalled_s: Callable[[], float], kv_capacity: int
    ) -> None:
        """Read the gauges from the engine whenever they are scraped."""
        self.running_requests.set_function(lambda: load().num_running)
        self.waiting_requests.set_function(lambda: load().num_waiting)
        self.kv_used_tokens.set_function(lambda: load().kv_used_tokens)
        self.kv_used_ratio.set_function(lambda: load().kv_used_tokens / kv_capacity)
        self.stalled_s.set_function(stalled_s)
        self.kv_capacity_tokens.set(kv_capacity)

    def observe_compile(self, outcome: str, duration_s: float) -> None:
        """Note a constraint that was asked for."""
        self.constraint_compiles.labels(outcome).inc()
        if outcome != "cached":
            self.constraint_compile_s.observe(duration_s)

    def observe_step(self, facts: StepFacts) -> None:
        """Note one engine step. Any thread."""
        self.step_duration_s.observe(facts.duration_s)
        self.tokens.labels("prefill").inc(facts.prefill_tokens)
        self.tokens.labels("decode").inc(facts.decode_tokens)
        self.preemptions.inc(facts.num_preempted)
        if facts.failed:
            self.step_failures.inc()
