"""Cheap collectors look on the wire as the library's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from headrace_common.loop_metrics import LoopCounter, LoopHistogram

BOUNDS = (0.1, 0.5, 2.0)


def shown(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return sorted(line for line in text.splitlines() if "_created" not in line)


def test_what_is_scraped_equals_what_the_library_would_show() -> None:
    """Bounds are inclusive, buckets cumulative, labels as given."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counters = (
        LoopCounter("jobs", "Jobs.", ["kind", "end"], registry=ours),
        Counter("jobs", "Jobs.", ["kind", "end"], registry=theirs),
    )
    spreads = (
        LoopHistogram("wait_seconds", "Wait.", ["kind"], buckets=BOUNDS, registry=ours),
        Histogram("wait_seconds", "Wait.", ["kind"], buckets=BOUNDS, registry=theirs),
    )
    for counter in counters:
        counter.labels("a", "ok").inc()
        counter.labels("a", "ok").inc(2.5)
        counter.labels("b", "bad").inc()
    for spread in spreads:
        for value in (0.0, 0.1, 0.3, 0.5, 1.9, 7.0):
            spread.labels("a").observe(value)
    assert shown(ours) == shown(theirs)
    assert ours.get_sample_value("jobs_total", {"kind": "a", "end": "ok"}) == 3.5
