"""Rewriting touches only what was found."""

from headrace_guard.classifiers.base import Match
from headrace_guard.redact import clusters, redact


def match(start: int, end: int, category: str = "pii.x") -> Match:
    return Match(start, end, category, "rule", 1.0, start)


def test_only_the_span_changes() -> None:
    """Everything else stays byte for byte."""
    assert redact("héllo a@b.c, bye", [match(6, 11)]) == "héllo [redacted pii.x], bye"


def test_overlapping_spans_become_one_placeholder() -> None:
    """Named after the one that begins first."""
    spans = [match(2, 5, "pii.b"), match(1, 4, "pii.a"), match(5, 6, "pii.c")]
    assert redact("0123456", spans) == "0[redacted pii.a][redacted pii.c]6"
    assert [len(group) for group in clusters(spans)] == [2, 1]


def test_nothing_found_changes_nothing() -> None:
    """Not even a copy is needed to be equal."""
    assert redact("as it was", []) == "as it was"
