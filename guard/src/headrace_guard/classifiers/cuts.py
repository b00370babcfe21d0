"""What models read: the readable form of a text, cut into windows.

Training and serving both come through here, so they cannot differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from headrace_guard.canonical import canonical, canonical_strings
from headrace_guard.normalise import View

_SPACES = str.maketrans(dict.fromkeys("\t\n\r\v\f\u00a0\u2028\u2029", " "))
# Where a sentence, a line or a cell of a table ends.
_BREAK = re.compile(r"(?:[.!?]['\")]*\s+|[\n|]\s*)+")
# Fields of a chat's messages, in JSON or in a string of it.
_CHAT = re.compile(r"""\\*"(?:role|system)\\*"\s*:""")
# Shorter pieces belong to the next one; shorter windows go on with the next piece.
_LEAST_PIECE, _LEAST_WINDOW = 12, 60
_LEAST_SENTENCE = 20


@dataclass(frozen=True)
class Cut:
    """How long windows are and how far apart they begin. Characters of the reading.

    Args:
        num_chars: length; of windows by sentence the most.
        stride: from one to the next, in what is longer than a window.
        by_sentence: whether windows begin and end where sentences or lines do.
    """

    num_chars: int
    stride: int
    by_sentence: bool = False


WIDE = Cut(400, 200)
# For instructions hidden in documents: a window that begins and ends with what was put in has
# nothing else in it.
NARROW = Cut(160, 80, by_sentence=True)


@dataclass(frozen=True, slots=True)
class Reading:
    """A text as models read it: disguises undone, lower case, white space as spaces.

    Args:
        text: what is read; as long as the view's.
        view: the way back to the original.
    """

    text: str
    view: View

    def windows(self, cut: Cut) -> list[tuple[int, int]]:
        """Return the windows of the text."""
        if not cut.by_sentence:
            return spans(len(self.text), cut)
        # The text has spaces for line breaks, the view still has them.
        return [
            (begin + start, begin + stop)
            for begin, end in _sentences(self.view.text)
            for start, stop in spans(end - begin, cut)
        ]

    def sentences(self, cut: Cut) -> list[tuple[int, int]]:
        """Return each sentence or line by itself; of a text that is one, nothing."""
        text = self.view.text
        places = [0]
        for found in _BREAK.finditer(text):
            if found.end() - places[-1] >= _LEAST_SENTENCE and found.end() < len(text):
                places.append(found.end())
        if len(places) == 1:
            return []
        return [
            (begin + start, begin + stop)
            for begin, end in pairwise((*places, len(text)))
            for start, stop in spans(end - begin, cut)
        ]

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Return the original span of a stretch; (0, 0) if the stretch is empty."""
        return self.view.span(begin, end) if begin < end else (0, 0)


def read(text: str) -> Reading:
    """Return what is to be judged of a text. What is encoded in it is a text of its own."""
    return _reading(canonical(text))


def read_all(text: str) -> list[Reading]:
    """Return all that is to be judged of a text: of JSON in it, its strings.

    Where the form of a chat's messages may be the attack it is read as it stands, too.
    """
    strings = canonical_strings(text)
    if strings is None:
        return [read(text)]
    return [_reading(strings), *([read(text)] if _CHAT.search(text) else [])]


def _reading(view: View) -> Reading:
    return Reading(_flat(view.text), view)


def spans(num_chars: int, cut: Cut) -> list[tuple[int, int]]:
    """Return the windows of a text; the last one ends with the text, none is much shorter."""
    if num_chars <= cut.num_chars:
        return [(0, num_chars)]
    begins = list(range(0, num_chars - cut.num_chars, cut.stride))
    begins.append(num_chars - cut.num_chars)
    return [(begin, begin + cut.num_chars) for begin in begins]


def _sentences(text: str) -> list[tuple[int, int]]:
    """Return a stretch from the beginning of each piece on, as many pieces as it takes."""
    places = [0]
    for found in _BREAK.finditer(text):
        if found.end() - places[-1] >= _LEAST_PIECE and found.end() < len(text):
            places.append(found.end())
    places.append(len(text))
    stretches: list[tuple[int, int]] = []
    behind = 1
    for idx, begin in enumerate(places[:-1]):
        behind = max(behind, idx + 1)
        while behind < len(places) - 1 and places[behind] - begin < _LEAST_WINDOW:
            behind += 1
        stretches.append((begin, places[behind]))
    return stretches


def _flat(text: str) -> str:
    flat = text.lower()
    if len(flat) != len(text):
        # A few letters become two in lower case, which would move all positions.
        flat = "".join(low if len(low := char.lower()) == 1 else char for char in text)
    return flat.translate(_SPACES)
