"""Scans a growing text and says how far nothing can be found any more.

A scanner keeps the text that is still undecided. When more arrives, the classifiers judge that
window; what lies before every live beginning and is not cut by a match is *settled*: its matches
are final and it leaves the window. Settling depends on the text so far and not on how it was cut,
so any chunking gives the same matches and the same settled text.

Undecided text is bounded. The bound is looked at only at multiples of `GRID_CHARS` of the text,
again so that chunking makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace_guard.classifiers.base import Classifier, Match
from headrace_guard.classifiers.unescaped import Unescaped
from headrace_guard.normalise import BEFORE_CHARS, NO_LEFTS, Lefts, Window, next_lefts

GRID_CHARS = 256
# Undecided text with more than these invisible characters is not text but an attack on this module:
# every view of it has to be made anew with every piece.
MAX_HIDDEN_CHARS = 512


@dataclass(frozen=True, slots=True)
class Settled:
    """What one piece of text settled.

    Args:
        text: original text that is decided; follows the last one.
        start: its position in the whole text.
        matches: all that lies in it, positions in the whole text, sorted.
        is_stuck: the undecided text is at its bound; see `StreamScanner.give_up`.
    """

    text: str
    start: int
    matches: list[Match]
    is_stuck: bool = False

    def slice(self, start: int, end: int) -> str:
        """Return the text between two positions in the whole text."""
        return self.text[start - self.start : end - self.start]


class StreamScanner:
    """Scans one text.

    Args:
        classifiers: what to look for; none = everything is settled at once.
        max_held_chars: bound of the undecided text.
    """

    def __init__(self, classifiers: Sequence[Classifier], max_held_chars: int) -> None:
        self._classifiers = classifiers
        self._cutting = [one for one in classifiers if isinstance(one, Unescaped)]
        self._max_held_chars = max_held_chars
        self._lefts: Lefts = NO_LEFTS
        self._before = ""
        self._window = ""
        # Position of the window in the whole text.
        self._start = 0

    @property
    def num_held_chars(self) -> int:
        """Length of the undecided text."""
        return len(self._window)

    @property
    def num_scanned_chars(self) -> int:
        """Length of the text so far."""
        return self._start + len(self._window)

    def room(self) -> int:
        """Most characters that the next `feed` may take."""
        return GRID_CHARS - self.num_scanned_chars % GRID_CHARS if self._classifiers else 2**62

    def feed(self, text: str) -> Settled:
        """Take more text, at most `room` characters."""
        self._window += text
        if not self._classifiers:
            return self._settle(len(self._window), [])
        window = self._window_now(is_final=False)
        matches = self._find(window)
        live = min(classifier.live_from(window) for classifier in self._classifiers)
        # An encoded text is judged as a whole, so it leaves the window as a whole.
        whole = [span for one in self._cutting for span in one.spans(window)]
        settled = self._settle(_without_cuts(live, matches + whole), matches)
        return replace(settled, is_stuck=True) if self._is_stuck() else settled

    def finish(self) -> Settled:
        """Settle the rest: no text follows."""
        window = self._window_now(is_final=True)
        return self._settle(len(self._window), self._find(window))

    def give_up(self) -> Settled:
        """Settle the undecided text as it stands, with the matches that are in it."""
        window = self._window_now(is_final=False)
        return self._settle(len(self._window), self._find(window))

    def skip(self, text: str) -> Settled:
        """Settle everything held and *text* without looking."""
        self._window += text
        return self._settle(len(self._window), [])

    def _is_stuck(self) -> bool:
        if self.num_scanned_chars % GRID_CHARS or len(self._window) < MAX_HIDDEN_CHARS:
            return False
        window = self._window_now(is_final=False)
        return (
            len(self._window) >= self._max_held_chars
            or window.num_hidden_chars() >= MAX_HIDDEN_CHARS
        )

    def _window_now(self, is_final: bool) -> Window:
        return Window(self._window, self._lefts, is_final, self._before)

    def _find(self, window: Window) -> list[Match]:
        found = [match for one in self._classifiers for match in one.find(window)]
        found.sort()
        return found

    def _settle(self, end: int, matches: list[Match]) -> Settled:
        start, text = self._start, self._window[:end]
        self._window = self._window[end:]
        self._start += end
        if self._classifiers:
            self._lefts = next_lefts(self._lefts, text)
            self._before = (self._before + text[-BEFORE_CHARS:])[-BEFORE_CHARS:]
        placed = [
            replace(
                match,
                start=start + match.start,
                end=start + match.end,
                context_start=start + match.context_start,
            )
            for match in matches
            if match.end <= end
        ]
        return Settled(text, start, placed)


def _without_cuts(border: int, matches: Sequence[Match]) -> int:
    """Move *border* left until no match begins before it and ends after it."""
    # By descending end, a match that the border cuts is met before those it moves the border into.
    for match in sorted(matches, key=lambda one: one.end, reverse=True):
        if match.context_start < border < match.end:
            border = match.context_start
    return border
