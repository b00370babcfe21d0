"""Text as a classifier should see it, with the way back to the original positions.

Each character is mapped on its own: compatibility decomposition (NFKD, so that composed and
decomposed spellings meet), accents off, invisible characters off, and for words case folding and
one space per run of white space. Since no mapping looks at a neighbour, the view of a text is the
beginning of the view of any longer text: a chunk border can hide nothing.

One view is not enough, as every choice here can be abused. Looked at are (equal ones once):

    RAW        the text as it is
    DROPPED    invisible characters taken out        "ca<ZWSP>nary" is canary
    SEPARATED  invisible characters made a space     "the<ZWSP>canary" is canary too
    DECODED    tag characters read as ASCII          text that only a model sees
    LOOKALIKE  other scripts' letters read as ASCII  Cyrillic "canary" is canary

For words there are further readings on top of LOOKALIKE: see `headrace_guard.disguise`.
Trained classifiers read one text instead of many: see `headrace_guard.canonical`.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache

import re2

from headrace_guard.characters import decode_tag, is_dropped_mark, is_invisible, is_tag
from headrace_guard.lookalikes import ascii_lookalike


class Mode(Enum):
    """What becomes of invisible characters."""

    RAW = 0
    DROPPED = 1
    SEPARATED = 2
    DECODED = 3
    LOOKALIKE = 4


# Last visible character before a text, one per `Mode` in order; "" = nothing comes before.
Lefts = tuple[str, str, str, str, str]
NO_LEFTS: Lefts = ("", "", "", "", "")
BEFORE_CHARS = 32

# Control characters; the faster engine sees every text of every request.
_CONTROL = re2.compile(rb"[^\t\n\r -~]")
_IRREGULAR_RUN = re.compile(r"[^\t\n\r -~]+")
_IRREGULAR_OR_SPACES = re.compile(r"\s{2,}|[^\t\n\r -~]+")
_SPACES = re.compile(r"\s{2,}")
_RUN_OF_SPACES = re.compile("  +")
_ONE_SPACE = str.maketrans("\t\n\r", "   ")


@dataclass(frozen=True, slots=True)
class View:
    """A mapped text that knows where each of its characters comes from.

    Piece by piece: the character at ``starts[k] + d`` comes from ``origins[k] + steps[k] * d``.
    """

    text: str
    # Last character before the text; "" at the beginning of everything.
    left: str = ""
    starts: tuple[int, ...] = (0,)
    origins: tuple[int, ...] = (0,)
    steps: tuple[int, ...] = (1,)

    def origin(self, idx: int) -> int:
        """Return the original position of the character at *idx*."""
        piece = bisect_right(self.starts, idx) - 1
        return self.origins[piece] + self.steps[piece] * (idx - self.starts[piece])

    @classmethod
    def of(cls, text: str, places: Sequence[int], left: str = "") -> View:
        """Build a view from the original position of each character."""
        starts, steps = [0], [1]
        for idx in range(1, len(places)):
            step = places[idx] - places[idx - 1]
            if idx - starts[-1] == 1 and step == 0:
                steps[-1] = 0
            elif step != steps[-1]:
                starts.append(idx)
                steps.append(1)
        origins = tuple(places[start] for start in starts) if places else (0,)
        return cls(text, left, tuple(starts), origins, tuple(steps))

    def all_origins(self) -> list[int]:
        """Return the original position of each character."""
        places: list[int] = []
        ends = (*self.starts[1:], len(self.text))
        for start, end, origin, step in zip(
            self.starts, ends, self.origins, self.steps, strict=True
        ):
            length = max(0, end - start)
            places += range(origin, origin + length) if step else [origin] * length
        return places

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return the original span, end exclusive, of a span that is not empty."""
        return self.origin(start), self.origin(end - 1) + 1

    def cuts_character(self, idx: int) -> bool:
        """Whether the border before *idx* lies inside what one original character became."""
        return 0 < idx < len(self.text) and self.origin(idx) == self.origin(idx - 1)


@lru_cache(maxsize=65_536)
def map_character(char: str, mode: Mode, is_folded: bool) -> str:
    """Return what *char* becomes: none, one or several characters."""
    if mode is Mode.RAW:
        mapped = char
    elif mode is Mode.DECODED and is_tag(char):
        mapped = decode_tag(char)
    elif is_invisible(char):
        return " " if mode is Mode.SEPARATED else ""
    else:
        parts = unicodedata.normalize("NFKD", char)
        mapped = "".join(part for part in parts if not is_dropped_mark(part))
        if mode is Mode.LOOKALIKE:
            mapped = _as_ascii(char, mapped)
    if not is_folded:
        return mapped
    return "".join(" " if part.isspace() else _fold(part, mode) for part in mapped)


def _as_ascii(char: str, decomposed: str) -> str:
    if decomposed.isascii():
        # A letter or number in brackets that is one character.
        is_framed = len(decomposed) > 2 and decomposed[0] == "(" and decomposed[-1] == ")"
        return decomposed[1:-1] if is_framed else decomposed
    return ascii_lookalike(char) or "".join(ascii_lookalike(one) or one for one in decomposed)


@lru_cache(maxsize=65_536)
def _has_lookalike(char: str) -> bool:
    return map_character(char, Mode.LOOKALIKE, False) != map_character(char, Mode.DROPPED, False)


def _fold(char: str, mode: Mode) -> str:
    # Folding can bring an accent back (U+0130 becomes "i" and a dot above).
    folded = char.casefold()
    if mode is Mode.RAW:
        return folded
    return "".join(part for part in folded if not is_dropped_mark(part))


class _Builder:
    """Puts a view together, piece by piece."""

    def __init__(self, mode: Mode, is_folded: bool, left: str) -> None:
        self._mode, self._is_folded, self._left = mode, is_folded, left
        self._after_space = left.isspace()
        self._pieces: list[str] = []
        self._length = 0
        self._starts, self._origins, self._steps = [0], [0], [1]

    def add_regular(self, piece: str, at: int) -> None:
        """Add printable ASCII in which no two white-space characters follow one another."""
        if self._is_folded and piece:
            piece = piece.translate(_ONE_SPACE).lower()
            if self._after_space and piece[0] == " ":
                piece, at = piece[1:], at + 1
        if piece:
            self._append(piece, at, 1)

    def add_spaces(self, at: int) -> None:
        """Add a run of white space to a folded view: one space, at the first of them."""
        if not self._after_space:
            self._append(" ", at, 1)

    def add_irregular(self, char: str, at: int) -> None:
        """Add any one character."""
        mapped = map_character(char, self._mode, self._is_folded)
        if self._is_folded and " " in mapped:
            mapped = _SPACES.sub(" ", mapped)
            if self._after_space and mapped[0] == " ":
                mapped = mapped[1:]
        if mapped:
            self._append(mapped, at, 1 if len(mapped) == 1 else 0)

    def view(self) -> View:
        """Return what was put together."""
        maps = tuple(self._starts), tuple(self._origins), tuple(self._steps)
        return View("".join(self._pieces), self._left, *maps)

    def _append(self, mapped: str, at: int, step: int) -> None:
        goes_on = (
            step == self._steps[-1] == 1
            and at - self._origins[-1] == self._length - self._starts[-1]
        )
        if not goes_on:
            if self._starts[-1] == self._length:
                self._starts.pop(), self._origins.pop(), self._steps.pop()
            self._starts.append(self._length)
            self._origins.append(at)
            self._steps.append(step)
        self._pieces.append(mapped)
        self._length += len(mapped)
        self._after_space = mapped[-1] == " "


def view_of(text: str, mode: Mode, is_folded: bool, left: str = "") -> View:
    """Map *text*.

    Args:
        text: original text.
        mode: what becomes of invisible characters.
        is_folded: for words: case folded, one space per run of white space.
        left: last visible character before the text.
    """
    if is_regular(text):
        if not is_folded:
            return View(text, left)
        folded = text.translate(_ONE_SPACE).lower()
        if not (folded[:1] == " " and left.isspace()):
            return View(folded, left) if "  " not in folded else _collapsed(folded, left)
    else:
        mapped = _map_one_to_one(text, mode, is_folded)
        if mapped is not None and not (is_folded and _needs_collapsing(mapped, left)):
            return View(mapped, left)
    return _view_by_pieces(text, _Builder(mode, is_folded, left), is_folded)


def is_regular(text: str) -> bool:
    """Whether *text* is printable ASCII and common white space only."""
    return text.isascii() and _CONTROL.search(text.encode()) is None


def _collapsed(text: str, left: str) -> View:
    # Of each run of spaces the first one stays; the same as piece by piece, but much faster.
    pieces: list[str] = []
    starts, origins = [0], [0]
    length, done = 0, 0
    for run in _RUN_OF_SPACES.finditer(text):
        begin, end = run.span()
        pieces.append(text[done : begin + 1])
        length += begin + 1 - done
        done = end
        starts.append(length)
        origins.append(end)
    if done == len(text):
        del starts[-1], origins[-1]
    else:
        pieces.append(text[done:])
    return View("".join(pieces), left, tuple(starts), tuple(origins), (1,) * len(starts))


def _needs_collapsing(text: str, left: str) -> bool:
    return (left.isspace() and text[:1].isspace()) or _SPACES.search(text) is not None


def _map_one_to_one(text: str, mode: Mode, is_folded: bool) -> str | None:
    # Most text in most scripts: every character becomes exactly one, so positions stay.
    table = {ord(char): map_character(char, mode, is_folded) for char in set(text)}
    if any(len(mapped) != 1 for mapped in table.values()):
        return None
    return text.translate(table)


def _view_by_pieces(text: str, builder: _Builder, is_folded: bool) -> View:
    done = 0
    for run in (_IRREGULAR_OR_SPACES if is_folded else _IRREGULAR_RUN).finditer(text):
        builder.add_regular(text[done : run.start()], done)
        if is_folded and run.group().isspace():
            builder.add_spaces(run.start())
        else:
            for offset, char in enumerate(run.group(), run.start()):
                builder.add_irregular(char, offset)
        done = run.end()
    builder.add_regular(text[done:], done)
    return builder.view()


def fold(text: str) -> str:
    """Return *text* as a folded view without invisible characters shows it, outer spaces off."""
    return view_of(text, Mode.DROPPED, is_folded=True).text.strip()


def next_lefts(lefts: Lefts, text: str) -> Lefts:
    """Return the lefts of what follows *text*, which itself followed *lefts*."""
    if not text:
        return lefts
    last = text[-1]
    if " " <= last <= "~":
        return last, last, last, last, last
    raw, dropped, separated, decoded, lookalike = (
        _last(text, mode, lefts[mode.value]) for mode in Mode
    )
    return raw, dropped, separated, decoded, lookalike


def _last(text: str, mode: Mode, before: str) -> str:
    for char in reversed(text):
        mapped = map_character(char, mode, False)
        if mapped:
            return mapped[-1]
    return before


class Window:
    """A stretch of text under judgement, with its views made on demand.

    Args:
        text: original text.
        lefts: what came before it.
        is_final: nothing follows: the end of the text is a word border.
        before: the last `BEFORE_CHARS` of what came before it.
    """

    def __init__(
        self, text: str, lefts: Lefts = NO_LEFTS, is_final: bool = True, before: str = ""
    ) -> None:
        self.text, self.lefts, self.is_final, self.before = text, lefts, is_final, before
        self._views: dict[bool, list[View]] = {}
        # What classifiers worked out about the window and need again, by a name of theirs.
        self.notes: dict[str, object] = {}

    def plain_views(self) -> list[View]:
        """Views with letters as they are: for numbers and keys."""
        return self._of(False)

    def folded_views(self) -> list[View]:
        """Views for words: case folded, one space per run of white space."""
        return self._of(True)

    def word_view(self) -> View:
        """The folded view with other scripts' letters read as ASCII."""
        left = self.lefts[Mode.LOOKALIKE.value]
        if self._is_regular:
            # All modes agree on the text.
            for view in self.folded_views():
                if view.left == left:
                    return view
        return view_of(self.text, Mode.LOOKALIKE, is_folded=True, left=left)

    def num_hidden_chars(self) -> int:
        """Characters that some view leaves out: invisible ones, accents, repeated white space."""
        views = self.plain_views() + self.folded_views()
        return len(self.text) - min(len(view.text) for view in views)

    def _of(self, is_folded: bool) -> list[View]:
        views = self._views.get(is_folded)
        if views is None:
            views = []
            for mode in self._modes:
                view = view_of(self.text, mode, is_folded, self.lefts[mode.value])
                if view not in views:
                    views.append(view)
            self._views[is_folded] = views
        return views

    @cached_property
    def _is_regular(self) -> bool:
        return is_regular(self.text)

    @cached_property
    def _modes(self) -> list[Mode]:
        if self._is_regular:
            # All modes agree on the text; what came before may differ.
            if self.lefts.count(self.lefts[0]) == len(self.lefts):
                return _ANY_MODE
            return list(dict(zip(self.lefts, Mode, strict=True)).values())
        chars = set(self.text)
        modes = [Mode.RAW, Mode.DROPPED]
        for mode, matters in _EXTRA_MODES:
            differs = self.lefts[mode.value] != self.lefts[Mode.DROPPED.value]
            if differs or any(matters(char) for char in chars):
                modes.append(mode)
        return modes


_ANY_MODE = [Mode.DROPPED]
_EXTRA_MODES: tuple[tuple[Mode, Callable[[str], bool]], ...] = (
    (Mode.SEPARATED, is_invisible),
    (Mode.DECODED, is_tag),
    (Mode.LOOKALIKE, _has_lookalike),
)
