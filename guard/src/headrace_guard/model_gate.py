"""Trained classifiers on a growing output: windows that close at places the text alone decides.

A window closes after a sentence or after `WINDOW_CHARS`, and is judged with what came before it as
context. Under a policy that blocks, the text of an open window waits; otherwise nothing waits.
Windows depend on positions and characters only, so any chunking gives the same verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace_guard.classifiers.base import Match
from headrace_guard.classifiers.text_model import Asked, TextModels, Trust
from headrace_guard.decode import decoded, placed
from headrace_guard.normalise import Window

# About 32 tokens of English.
WINDOW_CHARS = 128
CONTEXT_CHARS = 384
_FIRST_RUN = re.compile(r"[A-Za-z0-9+/_-]{12,}={0,2}")
# A sentence shorter than this goes on with the next one.
_MIN_SENTENCE_CHARS = 48
_SENTENCE_ENDS = frozenset(".!?\n\u3002\uff01\uff1f")


@dataclass(frozen=True, slots=True)
class Judged:
    """What one piece of text led to.

    Args:
        text: may go on.
        matches: what was found, positions in the whole text.
        is_blocked: something was found that must not get out; nothing more may follow.
    """

    text: str
    matches: tuple[Match, ...] = ()
    is_blocked: bool = False


class ModelGate:
    """Judges one choice. Not safe for use by two threads at a time.

    Args:
        models: trained classifiers.
        asked: what to ask.
        blocking: categories whose hits end the text; none = nothing waits.
    """

    def __init__(self, models: TextModels, asked: Asked, blocking: frozenset[str]) -> None:
        self._models, self._asked, self._blocking = models, asked, blocking
        self._context = ""
        self._window = ""
        # Position of the window in the whole text.
        self._start = 0

    @property
    def num_held_chars(self) -> int:
        """Characters of the open window that wait."""
        return len(self._window) if self._blocking else 0

    @property
    def num_scanned_chars(self) -> int:
        """Length of the text so far."""
        return self._start + len(self._window)

    def feed(self, text: str) -> Iterator[Judged]:
        """Take more text, window by window; what the caller does not wait for is not taken."""
        done = 0
        for at, char in enumerate(text):
            self._window += char
            if self._closes(char):
                judged = self._close()
                if not self._blocking:
                    judged = replace(judged, text=text[done : at + 1])
                done = at + 1
                yield judged
        if not self._blocking and done < len(text):
            yield Judged(text[done:])

    def finish(self) -> Iterator[Judged]:
        """Judge what is left: no text follows."""
        judged = self._close()
        yield judged if self._blocking else replace(judged, text="")

    def skip(self, text: str) -> str:
        """Let everything held and *text* go on without looking."""
        held = self._window if self._blocking else ""
        self._start += len(self._window) + len(text)
        self._context, self._window = (self._window + text)[-CONTEXT_CHARS:], ""
        return held + text

    def _in_encoded(self, text: str) -> list[Match]:
        """Judge what is encoded in a window and what comes before it, each text on its own."""
        pieces = decoded(text).pieces
        run = _FIRST_RUN.match(text)
        if self._start > len(self._context) and run is not None:
            # The context may begin inside a run of base64: one of four places is the right one.
            pieces += tuple(
                replace(piece, end=run.end())
                for shift in range(1, 4)
                for piece in decoded(run.group()[shift:]).pieces
            )
        return [
            placed(match, piece)
            for piece in pieces
            for match in self._models.judge_now(Window(piece.text), Trust.MODEL, self._asked)
            if piece.end > len(self._context)
        ]

    def _closes(self, char: str) -> bool:
        length = len(self._window)
        return length >= WINDOW_CHARS or (length >= _MIN_SENTENCE_CHARS and char in _SENTENCE_ENDS)

    def _close(self) -> Judged:
        window, context = self._window, self._context
        if not window.strip():
            found: list[Match] = []
        else:
            found = self._models.judge_now(Window(context + window), Trust.MODEL, self._asked)
            found += self._in_encoded(context + window)
        offset = self._start - len(context)
        # What came before was judged then: a span begins no earlier than its window.
        matches = tuple(
            replace(
                match,
                start=max(self._start, match.start + offset),
                end=max(self._start + 1, match.end + offset),
                context_start=self._start,
            )
            for match in found
        )
        self._start += len(window)
        self._context, self._window = (context + window)[-CONTEXT_CHARS:], ""
        is_blocked = any(match.category in self._blocking for match in matches)
        return Judged("" if is_blocked else window, matches, is_blocked)
