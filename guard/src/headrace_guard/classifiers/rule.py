"""A rule (pattern plus check) and a set of them that runs as one classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import re2

from headrace_guard.classifiers.base import Match
from headrace_guard.classifiers.pattern import Pattern
from headrace_guard.normalise import View, Window

# From a candidate to the span in it that counts, or None. Sees the candidate alone.
Check = Callable[[str], tuple[int, int] | None]

_WORD = "A-Za-z0-9_"
# What stands before the first character of everything.
_NOTHING = "\n"


@dataclass(frozen=True)
class Rule:
    """Finds one kind of thing.

    Args:
        category: e.g. "pii.card".
        pattern: what candidates look like; ASCII only.
        check: says which candidates count; None = all.
        not_after: members of the character class that may not stand right before a candidate.
        score: how sure a hit is, 0..1.
    """

    category: str
    pattern: Pattern
    check: Check | None = None
    not_after: str = _WORD
    score: float = 1.0

    @property
    def detector(self) -> str:
        """Name in findings."""
        return f"rule.{self.category}/1"


class _Compiled:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._expression = _compile(f"[^{rule.not_after}](?:{rule.pattern.full()})")

    def spans(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        """Yield (candidate start, start, end) in *data*, whose first byte is context."""
        at = 0
        while (found := self._expression.search(data, at)) is not None:
            begin, end = found.span()
            begin += 1
            span = self._check(data[begin:end])
            if span is None:
                # A candidate that does not count must not hide one that begins inside it.
                at = begin
                continue
            yield begin, begin + span[0], begin + span[1]
            at = begin + span[1] - 1

    def _check(self, candidate: bytes) -> tuple[int, int] | None:
        if self.rule.check is None:
            return 0, len(candidate)
        return self.rule.check(candidate.decode("ascii"))


def _compile(expression: str) -> re2._Regexp:
    options = re2.Options()
    options.log_errors = False
    return re2.compile(expression.encode("ascii"), options)


class RuleSet:
    """Rules as one classifier; one expression of them all says first whether any can match."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = [_Compiled(rule) for rule in rules]
        self.categories = frozenset(one.rule.category for one in self._rules)
        bodies = [(one.rule.not_after, one.rule.pattern) for one in self._rules]
        self._any = _compile("|".join(f"[^{before}](?:{p.full()})" for before, p in bodies))
        live = "|".join(f"[^{before}](?:{p.prefix()})" for before, p in bodies)
        self._live = _compile(rf"(?:{live})\z")

    def find(self, window: Window) -> list[Match]:
        """All rules' matches, per rule leftmost first and without overlap."""
        return sorted({match for view in window.plain_views() for match in self._find(view)})

    def live_from(self, window: Window) -> int:
        """Where the longest tail begins that some rule's match can begin with."""
        return min(self._live_origin(view, window) for view in window.plain_views())

    def _find(self, view: View) -> Iterator[Match]:
        data = _data(view)
        if self._any.search(data) is None:
            return
        for one in self._rules:
            for begin, start, end in one.spans(data):
                original_start, original_end = view.span(start - 1, end - 1)
                yield Match(
                    original_start,
                    original_end,
                    one.rule.category,
                    one.rule.detector,
                    one.rule.score,
                    view.origin(begin - 1),
                )

    def _live_origin(self, view: View, window: Window) -> int:
        found = self._live.search(_data(view))
        # The character before the match is context: its position there is the match's in the view.
        start = len(view.text) if found is None else found.span()[0]
        return len(window.text) if start >= len(view.text) else view.origin(start)


def _data(view: View) -> bytes:
    # One byte per character, so that positions are the same; no rule knows "?" or other scripts.
    return ((view.left or _NOTHING)[-1] + view.text).encode("ascii", "replace")
