"""Words in disguise: digits for letters, letters turned by 13, letters written one by one.

Each reading is made from the folded view in which other scripts' letters are ASCII already:

    LEET_I, LEET_L  digits and signs as the letters they stand for ("1" is i in one, l in the other)
    ROT13           letters turned by 13
    SPACED          of the first two and the view itself: only letters that stand alone, run by
                    run, without what parts them ("c a-n.a r y")

The first three map characters one by one, so a chunk border hides nothing. Whether a letter stands
alone depends on the one behind it: at the end of a text that goes on, a match is not certain yet.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, replace
from enum import Enum
from string import ascii_lowercase

import re2

from headrace_guard.normalise import View, Window


class Disguise(Enum):
    """How a word was hidden."""

    LEET = "leet"
    ROT13 = "rot13"
    SPACED = "spaced"


@dataclass(frozen=True, slots=True)
class Reading:
    """A view and what was undone to get it."""

    disguise: Disguise
    view: View


# Stands between two runs of lone letters; no term has it.
RUN_BREAK = "\n"
# Most characters between two letters of one run.
_MAX_GAP = 3
_LEET = {"0": "o", "3": "e", "4": "a", "5": "s", "7": "t", "@": "a", "$": "s"}
_LEET_I = str.maketrans({**_LEET, "1": "i", "!": "i", "|": "i"})
_LEET_L = str.maketrans({**_LEET, "1": "l", "!": "i", "|": "l"})
_ROT13 = str.maketrans(ascii_lowercase, codecs.encode(ascii_lowercase, "rot13"))
_LEET_CHAR = re.compile(r"[013457@$!|]")
# A capital i after a small letter passes for an l.
_CAPITAL_I = re.compile(r"(?<=[a-z])I+")
_HAS_CAPITAL_I = re2.compile(rb"[a-z]I")
_ALONE = re.compile(r"(?<![^\W_])[^\W_](?![^\W_])")
_ALONE_TWICE = re.compile(r"(?<![^\W_])[^\W_][\W_]{1,3}[^\W_](?![^\W_])")
# The same for folded ASCII, which is most text, in a faster engine.
_ASCII_ALONE = re2.compile(rb"(?:^|[^0-9a-z])[0-9a-z](?:[^0-9a-z]|$)")
_ASCII_TWICE = re2.compile(rb"(?:^|[^0-9a-z])[0-9a-z][^0-9a-z]{1,3}[0-9a-z](?:[^0-9a-z]|$)")
_WORD = re.compile(r"[^\W_]{2}")


def readings(window: Window) -> list[Reading]:
    """Return what the window may say in disguise; views that cannot differ are left out."""
    plain = window.word_view()
    leet = _leet_views(window, plain)
    found = [Reading(Disguise.LEET, view) for view in leet]
    found.append(Reading(Disguise.ROT13, replace(plain, text=plain.text.translate(_ROT13))))
    if _has_lone_letters(plain.text, window.is_final):
        found += [Reading(Disguise.SPACED, spaced_letters(view)) for view in (plain, *leet)]
    return found


def _has_lone_letters(text: str, is_final: bool) -> bool:
    if not text.isascii():
        return (_ALONE_TWICE if is_final else _ALONE).search(text) is not None
    data = text.encode()
    if is_final:
        return _ASCII_TWICE.search(data) is not None
    return _ASCII_ALONE.search(data) is not None


def _leet_views(window: Window, plain: View) -> list[View]:
    views = []
    if _LEET_CHAR.search(plain.text):
        views = [
            replace(plain, text=plain.text.translate(_LEET_I)),
            replace(plain, text=plain.text.translate(_LEET_L)),
        ]
    if _HAS_CAPITAL_I.search(window.text.encode("ascii", "replace")):
        shown = _CAPITAL_I.sub(lambda run: "l" * len(run.group()), window.text)
        view = Window(shown, window.lefts, window.is_final).word_view()
        views.append(replace(view, text=view.text.translate(_LEET_L)))
    return views


def spaced_letters(view: View) -> View:
    """Return only the letters and digits that stand alone, a break between two runs of them."""
    chars: list[str] = []
    origins: list[int] = []
    end = -1 - _MAX_GAP
    for found in _ALONE.finditer(view.text):
        start = found.start()
        if start == 0 and view.left[-1:].isalnum():
            continue
        if start - end > _MAX_GAP and chars:
            chars.append(RUN_BREAK)
            origins.append(view.origin(start))
        chars.append(found.group())
        origins.append(view.origin(start))
        end = start + 1
    rest = view.text[max(end, 0) :]
    if chars and (len(rest) > _MAX_GAP or _WORD.search(rest)):
        chars.append(RUN_BREAK)
        origins.append(view.origin(len(view.text) - 1))
    if not chars:
        return View("")
    steps = (1,) * len(chars)
    return View("".join(chars), "", tuple(range(len(chars))), tuple(origins), steps)


def counts_as_leet(original: str) -> bool:
    """Whether a stretch of text mixes letters and other characters as only a disguise does."""
    num_letters = sum(char.isalpha() for char in original)
    if num_letters == len(original):
        return _CAPITAL_I.search(original) is not None
    # "a55" is a road.
    return num_letters >= (1 if len(original) > 4 else 2)
