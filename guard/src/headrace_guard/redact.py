"""Rewriting: only what was found changes, everything else stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar


class Span(Protocol):
    """Something with a place and a category."""

    @property
    def start(self) -> int:
        """First character."""
        ...

    @property
    def end(self) -> int:
        """Behind the last character."""
        ...

    @property
    def category(self) -> str:
        """What it is."""
        ...


AnySpan = TypeVar("AnySpan", bound=Span)


def placeholder(category: str) -> str:
    """Return what stands in the place of a found span."""
    return f"[redacted {category}]"


def clusters(spans: Iterable[AnySpan]) -> Iterator[list[AnySpan]]:
    """Group spans that overlap; groups and their members come sorted by start."""
    group: list[AnySpan] = []
    end = 0
    for span in sorted(spans, key=lambda one: (one.start, one.end, one.category)):
        if group and span.start >= end:
            yield group
            group = []
        end = max(end, span.end) if group else span.end
        group.append(span)
    if group:
        yield group


def redact(text: str, spans: Sequence[Span]) -> str:
    """Put a placeholder in the place of each group of overlapping spans."""
    pieces: list[str] = []
    done = 0
    for group in clusters(spans):
        pieces += [text[done : group[0].start], placeholder(group[0].category)]
        done = max(span.end for span in group)
    return "".join([*pieces, text[done:]])
