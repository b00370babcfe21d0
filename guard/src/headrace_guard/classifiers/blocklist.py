"""Forbidden words and phrases: Aho-Corasick over folded text, whole words only.

One pass finds any number of terms. A term hits only as whole words ("art" is not in "party"), where
the script has words at all (see `characters.forms_words`); "_" and punctuation part words. In a
stream a tail of the text is live while it begins some term.

Terms are looked for in disguise as well (see `headrace_guard.disguise`): as whole words in leet and
ROT13, anywhere in letters that are written one by one. Short terms are left out there, as they
would be found by chance.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import ahocorasick

from headrace_guard.characters import forms_words
from headrace_guard.classifiers.base import Match
from headrace_guard.disguise import Disguise, Reading, counts_as_leet, readings
from headrace_guard.normalise import View, Window, fold

CATEGORY = "blocklist"
DETECTOR = "aho_corasick/1"
MAX_TERM_CHARS = 200
# Shortest term that is looked for by kind of disguise. Characters.
_MIN_CHARS = {Disguise.LEET: 3, Disguise.ROT13: 4, Disguise.SPACED: 4}


class BlocklistTooLargeError(ValueError):
    """More terms, or longer ones, than a blocklist may have."""


class Blocklist:
    """The terms of one policy and one key.

    Args:
        terms: words and phrases; case, accents and white space do not matter.

    Raises:
        BlocklistTooLargeError: a term is too long.
    """

    def __init__(self, terms: Iterable[str]) -> None:
        folded = sorted({fold(term) for term in terms} - {""})
        self.max_term_chars = max(map(len, folded), default=0)
        if self.max_term_chars > MAX_TERM_CHARS:
            raise BlocklistTooLargeError(f"a term is longer than {MAX_TERM_CHARS} characters")
        self.num_chars = sum(map(len, folded))
        self.terms_id = _terms_id(folded)
        self._first_chars = frozenset(term[0] for term in folded)
        self._automaton = _automaton(folded)
        compact = {"".join(filter(str.isalnum, term)) for term in folded}
        self._compact = sorted(term for term in compact if len(term) >= _MIN_CHARS[Disguise.SPACED])
        self._spaced_automaton = _automaton(self._compact)

    def find(self, window: Window) -> list[Match]:
        """Every occurrence as whole words, overlapping ones too."""
        if not self.num_chars:
            return []
        spans = {span for view in window.folded_views() for span in self._spans(view, window)}
        matches = [Match(s, e, CATEGORY, DETECTOR, 1.0, s) for s, e in spans]
        for reading in readings(window):
            detector = f"{DETECTOR}+{reading.disguise.value}"
            found = set(self._disguised_spans(reading, window)) - spans
            matches += [Match(s, e, CATEGORY, detector, 1.0, s) for s, e in found]
            spans |= found
        return sorted(matches)

    def live_from(self, window: Window) -> int:
        """Where the longest tail begins that is the beginning of a term."""
        if not self.num_chars:
            return len(window.text)
        live = min(self._live_origin(view, window) for view in window.folded_views())
        return min([live, *(self._live_in_disguise(one, window) for one in readings(window))])

    def _spans(self, view: View, window: Window) -> Iterator[tuple[int, int]]:
        for last, length in self._automaton.iter(view.text):
            start, end = last + 1 - length, last + 1
            if not _is_border(view, start) or view.cuts_character(start):
                continue
            if end == len(view.text):
                if window.is_final:
                    yield view.span(start, end)
            elif _is_border(view, end) and not view.cuts_character(end):
                yield view.span(start, end)

    def _disguised_spans(self, reading: Reading, window: Window) -> Iterator[tuple[int, int]]:
        view, disguise = reading.view, reading.disguise
        is_spaced = disguise is Disguise.SPACED
        automaton = self._spaced_automaton if is_spaced else self._automaton
        if is_spaced and not self._compact:
            return
        for last, length in automaton.iter(view.text):
            start, end = last + 1 - length, last + 1
            is_whole = window.is_final if end == len(view.text) else True
            if not is_whole or length < _MIN_CHARS[disguise]:
                continue
            begin, finish = view.span(start, end)
            if is_spaced or (
                _parts_words(view, window, start)
                and _parts_words(view, window, end)
                and (disguise is Disguise.ROT13 or counts_as_leet(window.text[begin:finish]))
            ):
                yield begin, finish

    def _live_origin(self, view: View, window: Window) -> int:
        text = view.text
        for start in range(max(0, len(text) - self.max_term_chars), len(text)):
            if (
                text[start] in self._first_chars
                and _is_border(view, start)
                and self._automaton.match(text[start:])
            ):
                return view.origin(start)
        return len(window.text)

    def _live_in_disguise(self, reading: Reading, window: Window) -> int:
        text = reading.view.text
        is_spaced = reading.disguise is Disguise.SPACED
        if is_spaced and not self._compact:
            return len(window.text)
        automaton = self._spaced_automaton if is_spaced else self._automaton
        for start in range(max(0, len(text) - self.max_term_chars), len(text)):
            if (is_spaced or _parts_words(reading.view, window, start)) and automaton.match(
                text[start:]
            ):
                return reading.view.origin(start)
        return len(window.text)


def _terms_id(terms: list[str]) -> str:
    lengths = ",".join(str(len(term)) for term in terms)
    data = f"{lengths}:{''.join(terms)}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).hexdigest()


def _automaton(terms: list[str]) -> Any:  # Any: the extension has no types
    automaton = ahocorasick.Automaton()
    for term in terms:
        automaton.add_word(term, len(term))
    if terms:
        automaton.make_automaton()
    return automaton


def _parts_words(view: View, window: Window, idx: int) -> bool:
    """Whether *idx* is a border of words in the original: there "!" is a sign, not a letter."""
    if idx == len(view.text):
        return True
    before = window.text[view.origin(idx - 1)] if idx else view.left
    return not (before and forms_words(before[-1]) and forms_words(window.text[view.origin(idx)]))


def _is_border(view: View, idx: int) -> bool:
    before = view.text[idx - 1] if idx else view.left
    return not (before and forms_words(before[-1]) and forms_words(view.text[idx]))


class BlocklistCache:
    """Keys' blocklists by their terms, so that each automaton is built once.

    Args:
        max_lists: how many are kept; the one unused for longest goes first.
        max_terms: terms in one list.
        max_chars: characters in one list.
    """

    def __init__(self, max_lists: int, max_terms: int, max_chars: int) -> None:
        self._max_lists, self._max_terms, self._max_chars = max_lists, max_terms, max_chars
        self._lists: OrderedDict[tuple[str, ...], Blocklist] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lists)

    def get(self, terms: tuple[str, ...]) -> Blocklist:
        """Return the blocklist of *terms*.

        Raises:
            BlocklistTooLargeError: too many or too long terms.
        """
        found = self._lists.get(terms)
        if found is None:
            if len(terms) > self._max_terms or sum(map(len, terms)) > self._max_chars:
                raise BlocklistTooLargeError(
                    f"more than {self._max_terms} terms or {self._max_chars} characters"
                )
            found = self._lists[terms] = Blocklist(terms)
            if len(self._lists) > self._max_lists:
                self._lists.popitem(last=False)
        self._lists.move_to_end(terms)
        return found
