"""What every classifier is: rules and blocklists now, trained models beside them.

A classifier judges a `Window`. In a stream the window slides: it begins where nothing is undecided
before it. Two promises make the result independent of how the stream was cut:

* `live_from` is a position such that no match, whatever text follows, begins before it and ends
  after the window's end;
* a match that ends before `live_from` is in `find` for this window and for every longer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace_guard.normalise import Window


@dataclass(frozen=True, slots=True, order=True)
class Match:
    """Something found. Positions are code points of the window's original text, end exclusive."""

    start: int
    end: int
    category: str
    detector: str
    # 0..1.
    score: float
    # Where the text begins that the classifier needed to see; <= start.
    context_start: int


class Classifier(Protocol):
    """Finds things of some categories. Stateless: one object serves all requests and threads."""

    def find(self, window: Window) -> list[Match]:
        """Return what is in the window for sure, or would be if the window ended the text."""
        ...

    def live_from(self, window: Window) -> int:
        """Return the first position where something may begin that the end cuts off.

        The window's length if there is none.
        """
        ...
