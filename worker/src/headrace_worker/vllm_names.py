"""The worker's metrics once more under the names that vLLM gives them.

Dashboards, autoscalers and routers that know vLLM read them unchanged. Values are those of our own
collectors at the moment of the scrape; nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace_worker.metrics import WorkerMetrics


class VllmNames(Collector):
    """Collector of renamed metrics.

    Args:
        metrics: ours.
        model_name: label of every sample, as vLLM has it.
    """

    def __init__(self, metrics: WorkerMetrics, model_name: str) -> None:
        self._model_name = model_name
        self._renamed: dict[str, Collector] = {
            "num_requests_running": metrics.running_requests,
            "num_requests_waiting": metrics.waiting_requests,
            "kv_cache_usage_perc": metrics.kv_used_ratio,
            "prefix_cache_queries": metrics.prefix_query_tokens,
            "prefix_cache_hits": metrics.prefix_hit_tokens,
            "num_preemptions": metrics.preemptions,
            "prompt_tokens": metrics.prefix_query_tokens,
            "generation_tokens": metrics.output_tokens,
            "time_to_first_token_seconds": metrics.ttft_s,
            "request_time_per_output_token_seconds": metrics.tpot_s,
            "request_queue_time_seconds": metrics.queue_s,
        }

    def collect(self) -> Iterable[Metric]:
        """Yield each metric under its other name."""
        for name, collector in self._renamed.items():
            for family in collector.collect():
                yield self._as(f"vllm:{name}", family)

    def _as(self, name: str, family: Metric) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            # When a counter began says nothing under another name.
            if suffix == "_created":
                continue
            labels = {**sample.labels, "model_name": self._model_name}
            renamed.add_sample(name + suffix, labels, sample.value)
        return renamed
