"""What the cache index counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class CacheIndexMetrics:
    """Collectors of the cache index."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.publishers = Gauge(
            "headrace_cache_index_publishers", "Workers connected now.", registry=registry
        )
        self.batches = Counter(
            "headrace_cache_index_batches", "Event batches written.", registry=registry
        )
        self.unreadable = Counter(
            "headrace_cache_index_unreadable",
            "KV events, of workers and engines, that could not be read; what they may have said is "
            "told anew, or forgotten.",
            registry=registry,
        )
        self.snapshots = Counter(
            "headrace_cache_index_snapshots", "Snapshots written.", registry=registry
        )
        self.replies = Counter(
            "headrace_cache_index_replies",
            "Answers to publishers: acknowledgements, replay and snapshot requests.",
            ["kind"],
            registry=registry,
        )
        self.refused = Counter(
            "headrace_cache_index_refused_recipes",
            "Publishers refused because their block hashes differ from ours.",
            registry=registry,
        )
        self.store_failures = Counter(
            "headrace_cache_index_store_failures",
            "Attempts to reach Redis that failed; each is made again.",
            registry=registry,
        )
        self.dropped = Counter(
            "headrace_cache_index_dropped_replicas",
            "Replicas dropped because their publisher's lease ended.",
            registry=registry,
        )
        self.engines = Gauge(
            "headrace_cache_index_engines",
            "Engines of another make whose KV events are followed now.",
            registry=registry,
        )
        self.engine_gaps = Counter(
            "headrace_cache_index_engine_gaps",
            "Times that an engine's KV events were missing some; they are replayed or built anew.",
            registry=registry,
        )
        self.engine_left_out = Counter(
            "headrace_cache_index_engine_left_out_blocks",
            "Blocks of engines that cannot be told in our hashes: parent unknown, images, foreign "
            "salts.",
            registry=registry,
        )
