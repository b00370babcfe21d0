"""One readable text for trained classifiers, which must see in use what they saw in training.

Blocklists and rules look at many views of a text (`headrace_guard.normalise`); a model is given
one. On top of the view in which tags are read and invisible characters left out:

    words of mixed scripts, and whole words of lookalikes in a mostly ASCII text, become ASCII
    runs of lone letters become words ("i g n o r e" is "ignore", a wide gap parts words)
    digits and signs inside words become letters ("1gn0re"), not in names such as "utf8" or "gpt4"

Training and service call the same function. Case and white space stay: they tell something.
Compatibility forms stay decomposed, which shows in Korean and Japanese only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import re2

from headrace_guard.json_text import strings_of
from headrace_guard.lookalikes import ascii_lookalike
from headrace_guard.normalise import Mode, View, view_of

_IRREGULAR_WORD = re.compile(r"\S*[^\x00-\x7f]\S*")
# Four or more letters that stand alone, each at most three other characters behind the last.
_SPACED = re.compile(r"(?<![^\W_])[^\W\d_](?:[\W_]{1,3}[^\W\d_](?![^\W_])){3,}")
_GAP = re.compile(r"[\W_]+")
# The same of ASCII text, four letters of it, in a faster engine: most text has none.
_HAS_SPACED = re2.compile(
    rb"(?:^|[^0-9A-Za-z])[A-Za-z](?:[^0-9A-Za-z]{1,3}[A-Za-z]){3}(?:[^0-9A-Za-z]|$)"
)
_LEET_WORD = re2.compile(rb"[A-Za-z013457@$!|]*[013457@$!|][A-Za-z013457@$!|]*[A-Za-z]")
_DOMAIN = re.compile(r"[\w-]*\.\w")
_LEET = str.maketrans("013457@$!|", "oieastasii")
_MIN_LETTERS, _MIN_WORD = 2, 4
# A stretch of a view and what comes in its place: characters, each with its place in the view.
_Edit = tuple[int, int, list[tuple[str, int]]]


def canonical(text: str) -> View:
    """Return *text* as trained classifiers read it. Time grows with its length."""
    return _readable(view_of(text, Mode.DECODED, is_folded=False))


def canonical_strings(text: str) -> View | None:
    """Return a text with JSON in it by the JSON's strings, a line each; None = there are none."""
    strings = strings_of(view_of(text, Mode.DECODED, is_folded=False))
    return None if strings is None else _readable(strings)


def _readable(view: View) -> View:
    return _leet(_joined(_lookalikes(view)))


def _edited(view: View, edits: Sequence[_Edit]) -> View:
    if not edits:
        return view
    origins = view.all_origins()
    text: list[str] = []
    places: list[int] = []
    done = 0
    for start, end, made in edits:
        text += [view.text[done:start], *(char for char, _ in made)]
        places += [*origins[done:start], *(origins[at] for _, at in made)]
        done = end
    return View.of("".join([*text, view.text[done:]]), places + origins[done:], view.left)


def _lookalikes(view: View) -> View:
    if view.text.isascii():
        return view
    letters = [char for char in view.text if char.isalpha()]
    is_mostly_ascii = 2 * sum(map(str.isascii, letters)) > len(letters)
    edits: list[_Edit] = []
    for word in _IRREGULAR_WORD.finditer(view.text):
        shown = [char if char.isascii() else ascii_lookalike(char) for char in word.group()]
        is_mixed = any(char.isascii() and char.isalpha() for char in word.group())
        if is_mixed or (is_mostly_ascii and all(shown)):
            chars = zip(shown, word.group(), strict=True)
            made = [
                (one, at) for at, (new, old) in enumerate(chars, word.start()) for one in new or old
            ]
            edits.append((word.start(), word.end(), made))
    return _edited(view, edits)


def _joined(view: View) -> View:
    if view.text.isascii() and _HAS_SPACED.search(view.text.encode()) is None:
        return view
    edits: list[_Edit] = []
    for run in _SPACED.finditer(view.text):
        widths = [sum(map(str.isspace, gap)) for gap in _GAP.findall(run.group())]
        places = [at for at in range(run.start(), run.end()) if view.text[at].isalpha()]
        made: list[tuple[str, int]] = []
        narrowest = min(widths)
        for at, width in zip(places, [narrowest, *widths], strict=True):
            # A gap wider than the narrowest one parts two words.
            made += [(" ", at - 1)] if width > narrowest else []
            made.append((view.text[at], at))
        edits.append((run.start(), run.end(), made))
    return _edited(view, edits)


def _leet(view: View) -> View:
    edits: list[_Edit] = []
    # One byte per character, so that positions are the same; "?" is in no such word.
    for found in _LEET_WORD.finditer(view.text.encode("ascii", "replace")):
        start, end = found.span()
        word = view.text[start:end]
        num_letters = sum(map(str.isalpha, word))
        num_signs = len(word) - num_letters
        is_word = len(word) >= _MIN_WORD and num_letters >= _MIN_LETTERS
        is_address = "@" in word and _DOMAIN.match(view.text, end) is not None
        if is_word and num_signs <= num_letters and not (is_address or word.startswith("0x")):
            made = list(zip(word.translate(_LEET), range(start, end), strict=True))
            edits.append((start, end, made))
    return _edited(view, edits)
