"""What models read: the readable form of a text, cut into windows.

Training and serving both come through here, so they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_guard.canonical import canonical
from headrace_guard.normalise import View

_SPACES = str.maketrans(dict.fromkeys("\t\n\r\v\f\u00a0\u2028\u2029", " "))


@dataclass(frozen=True)
class Cut:
    """How long windows are and how far apart they begin. Characters of the reading."""

    num_chars: int
    stride: int


WIDE = Cut(400, 200)
# For instructions hidden in documents: about a sentence or two.
NARROW = Cut(160, 80)


@dataclass(frozen=True, slots=True)
class Reading:
    """A text as models read it: disguises undone, lower case, white space as spaces.

    Args:
        text: what is read; as long as the view's.
        view: the way back to the original.
    """

    text: str
    view: View

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Return the original span of a stretch; (0, 0) if the stretch is empty."""
        return self.view.span(begin, end) if begin < end else (0, 0)


def read(text: str) -> Reading:
    """Return what is to be judged of a text. What is encoded in it is a text of its own."""
    view = canonical(text).view
    return Reading(_flat(view.text), view)


def spans(num_chars: int, cut: Cut) -> list[tuple[int, int]]:
    """Return the windows of a text; the last one ends with the text, none is much shorter."""
    if num_chars <= cut.num_chars:
        return [(0, num_chars)]
    begins = list(range(0, num_chars - cut.num_chars, cut.stride))
    begins.append(num_chars - cut.num_chars)
    return [(begin, begin + cut.num_chars) for begin in begins]


def _flat(text: str) -> str:
    flat = text.lower()
    if len(flat) != len(text):
        # A few letters become two in lower case, which would move all positions.
        flat = "".join(low if len(low := char.lower()) == 1 else char for char in text)
    return flat.translate(_SPACES)
