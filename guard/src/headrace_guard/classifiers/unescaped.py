r"""What other classifiers find in a text as it is, and as whoever parses it reads it.

Arguments of tools and answers in JSON are read by programs: ``go\ncanary`` holds the word canary,
``\u0063anary`` is one, and a card number behind ``\n`` begins at its first digit. So escapes are
undone, with the way back to their places. Nobody says whether a text is JSON, so it is always read
both ways; several backslashes count as one (JSON inside JSON).

No match begins or ends inside an escape: redacted text must still be JSON. In a stream an escape
is never cut in two, and what may become one is waited for: thirteen characters, twice that if it
is the first half of a pair of surrogates.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import re2

from headrace_guard.classifiers.base import Classifier, Match
from headrace_guard.classifiers.encoded import Encoded
from headrace_guard.json_text import undone
from headrace_guard.normalise import View, Window, next_lefts

_NOTE = "unescaped"
_LONE = r"\\{1,8}(?:[bfnrt\"/]|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2})"
_HIGH, _LOW = r"\\{1,8}u[dD][89abAB][0-9A-Fa-f]{2}", r"\\{1,8}u[dD][c-fC-F][0-9A-Fa-f]{2}"
_ESCAPE = re.compile(f"{_HIGH}{_LOW}|{_LONE}")
_AT_END = re.compile(f"(?:{_HIGH}{_LOW}|{_LONE})$")
# What may become an escape, or half of one, when more comes.
_BEGUN = r"\\{1,8}(?:u[0-9A-Fa-f]{0,3}|x[0-9A-Fa-f]?)?"
_OPEN = re2.compile(f"(?:{_HIGH}(?:{_BEGUN})?|{_BEGUN})$")


class _Cutting(Protocol):
    """A classifier that says what of a stream must stay together."""

    def spans(self, window: Window) -> list[Match]: ...


@dataclass(frozen=True, slots=True)
class _Reading:
    """A window as it is parsed.

    Args:
        shown: with its escapes undone, up to one that may begin at the end.
        view: the way back from there.
        escapes: where they stand, start and end.
        open_from: where an escape begins that the end cuts off; the window's length if none does.
    """

    shown: Window
    view: View
    escapes: tuple[tuple[int, int], ...]
    open_from: int


class Unescaped:
    """Finds what *inner* finds, in either reading.

    Args:
        inner: what to look for.
    """

    def __init__(self, inner: Sequence[Classifier]) -> None:
        self._inner = tuple(inner)
        self._cutting: tuple[_Cutting, ...] = tuple(
            one for one in self._inner if isinstance(one, Encoded)
        )

    def find(self, window: Window) -> list[Match]:
        """Everything in either reading, what is in both once."""
        plain = [match for one in self._inner for match in one.find(window)]
        reading = _read(window)
        if reading is None:
            return plain
        found = [match for one in self._inner for match in one.find(reading.shown)]
        parsed = [_placed(match, reading.view) for match in found]
        ends = {(match.category, match.end) for match in parsed}
        kept = [
            whole
            for match in plain
            if (whole := _whole(match, reading.escapes)) == match
            # As parsed it begins behind the escape.
            or (match.category, match.end) not in ends
        ]
        places = {(match.category, match.start, match.end) for match in kept}
        kept += (it for it in parsed if (it.category, it.start, it.end) not in places)
        return [_whole(match, reading.escapes) for match in kept]

    def live_from(self, window: Window) -> int:
        """Where something begins, in either reading, that may go on."""
        live = min([len(window.text), *(one.live_from(window) for one in self._inner)])
        reading = _read(window)
        if reading is None:
            return live
        first = min(one.live_from(reading.shown) for one in self._inner)
        if first < len(reading.shown.text):
            live = min(live, reading.view.origin(first))
        return min(live, reading.open_from)

    def spans(self, window: Window) -> list[Match]:
        """What must not be cut in two: escapes, and what *inner* says of either reading."""
        whole = [span for one in self._cutting for span in one.spans(window)]
        reading = _read(window)
        if reading is None:
            return whole
        whole += (Match(start, end, "", "", 0.0, start) for start, end in reading.escapes)
        found = (span for one in self._cutting for span in one.spans(reading.shown))
        whole += (_placed(span, reading.view) for span in found if span.start < span.end)
        return whole


def _read(window: Window) -> _Reading | None:
    if "\\" not in window.text and "\\" not in window.before:
        return None
    # Asked for several times a window, and the same each time.
    if _NOTE not in window.notes:
        window.notes[_NOTE] = _parse(window)
    found = window.notes[_NOTE]
    return found if isinstance(found, _Reading) else None


def _parse(window: Window) -> _Reading | None:
    text, lefts = window.text, window.lefts
    cut = None if window.is_final else _OPEN.search(text)
    open_from = len(text) if cut is None else cut.start()
    before = _AT_END.search(window.before)
    if before is not None:
        lefts = next_lefts(lefts, undone(before.group()))
    escapes = tuple(one.span() for one in _ESCAPE.finditer(text, 0, open_from))
    if not escapes and before is None and open_from == len(text):
        return None
    parts = _Parts()
    done = 0
    for start, end in escapes:
        parts.add(text[done:start], done, 1)
        parts.add(undone(text[start:end]), start, 0)
        done = end
    parts.add(text[done:open_from], done, 1)
    shown, view = parts.joined()
    return _Reading(Window(shown, lefts, window.is_final), view, escapes, open_from)


class _Parts:
    """Puts a parsed text together, and the way back."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._starts: list[int] = []
        self._origins: list[int] = []
        self._steps: list[int] = []
        self._length = 0

    def add(self, text: str, at: int, step: int) -> None:
        """Add what stands at a place; step 0 = all of it does."""
        if text:
            self._texts.append(text)
            self._starts.append(self._length)
            self._origins.append(at)
            self._steps.append(step)
            self._length += len(text)

    def joined(self) -> tuple[str, View]:
        """Return the text and its view."""
        text = "".join(self._texts)
        if not text:
            return "", View("")
        maps = tuple(self._starts), tuple(self._origins), tuple(self._steps)
        return text, View(text, "", *maps)


def _placed(match: Match, view: View) -> Match:
    start, end = view.span(match.start, match.end)
    context = view.origin(match.context_start)
    return replace(match, start=start, end=end, context_start=context)


def _whole(match: Match, escapes: Sequence[tuple[int, int]]) -> Match:
    """Return a match that begins and ends where escapes do."""
    start = _cut_at(escapes, match.start)[0]
    end = _cut_at(escapes, match.end)[1]
    if (start, end) == (match.start, match.end):
        return match
    return replace(match, start=start, end=end, context_start=min(match.context_start, start))


def _cut_at(escapes: Sequence[tuple[int, int]], place: int) -> tuple[int, int]:
    """Return the escape that a place lies within, or the place."""
    idx = bisect_left(escapes, (place, 0)) - 1
    if idx >= 0 and escapes[idx][0] < place < escapes[idx][1]:
        return escapes[idx]
    return place, place
