"""Forbidden words and phrases: Aho-Corasick over folded text, whole words only.

One pass finds any number of terms. A term hits only as whole words ("art" is not in "party"), where
the script has words at all (see `characters.forms_words`); "_" and punctuation part words. In a
stream a tail of the text is live while it begins some term.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import ahocorasick

from headrace_guard.characters import forms_words
from headrace_guard.classifiers.base import Match
from headrace_guard.normalise import View, Window, fold

CATEGORY = "blocklist"
DETECTOR = "aho_corasick/1"
MAX_TERM_CHARS = 200


class BlocklistTooLargeError(ValueError):
    """More terms, or longer ones, than a blocklist may have."""


class Blocklist:
    """The terms of one policy and one key.

    Args:
        terms: words and phrases; case, accents and white space do not matter.

    Raises:
        BlocklistTooLargeError: a term is too long.
    """

    categories = frozenset({CATEGORY})

    def __init__(self, terms: Iterable[str]) -> None:
        folded = sorted({fold(term) for term in terms} - {""})
        self.max_term_chars = max(map(len, folded), default=0)
        if self.max_term_chars > MAX_TERM_CHARS:
            raise BlocklistTooLargeError(f"a term is longer than {MAX_TERM_CHARS} characters")
        self.num_chars = sum(map(len, folded))
        self._first_chars = frozenset(term[0] for term in folded)
        self._automaton: Any = ahocorasick.Automaton()  # Any: the extension has no types
        for term in folded:
            self._automaton.add_word(term, len(term))
        if folded:
            self._automaton.make_automaton()

    def find(self, window: Window) -> list[Match]:
        """Every occurrence as whole words, overlapping ones too."""
        if not self.num_chars:
            return []
        spans = {span for view in window.folded_views() for span in self._spans(view, window)}
        return [Match(s, e, CATEGORY, DETECTOR, 1.0, s) for s, e in sorted(spans)]

    def live_from(self, window: Window) -> int:
        """Where the longest tail begins that is the beginning of a term."""
        if not self.num_chars:
            return len(window.text)
        return min(self._live_origin(view, window) for view in window.folded_views())

    def _spans(self, view: View, window: Window) -> Iterable[tuple[int, int]]:
        for last, length in self._automaton.iter(view.text):
            start, end = last + 1 - length, last + 1
            if not _is_border(view, start) or view.cuts_character(start):
                continue
            if end == len(view.text):
                if window.is_final:
                    yield view.span(start, end)
            elif _is_border(view, end) and not view.cuts_character(end):
                yield view.span(start, end)

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
