"""Rewriting: only what was found changes, everything else stays as it is."""

from __future__ import annotations

import re
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


# Characters before a span that `placeholder` wants to see.
BEFORE_CHARS = 8
_MEMBER = re.compile(r'"\s*:\s*\Z')
_NUMBER = re.compile(r"-?[0-9.]+\Z")


def placeholder(category: str, found: str, before: str) -> str:
    """Return what stands in the place of a found span.

    A number that is the value of a member of JSON becomes a string: arguments of functions and
    answers in JSON stay readable.

    Args:
        category: what it is.
        found: the span.
        before: the text before it, at least its last `BEFORE_CHARS`.
    """
    text = f"[redacted {category}]"
    is_member = _NUMBER.match(found) and _MEMBER.search(before[-BEFORE_CHARS:])
    return f'"{text}"' if is_member else text


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
        start, end = group[0].start, max(span.end for span in group)
        before = text[max(0, start - BEFORE_CHARS) : start]
        instead = placeholder(group[0].category, text[start:end], before)
        pieces += [text[done:start], instead]
        done = end
    return "".join([*pieces, text[done:]])
