"""Token ids to text, piece by piece, with stop strings.

Rules: only whole characters go out (a cut one becomes U+FFFD at the very end); a stop string is
found across token borders; text is held back only while it is the beginning of a stop string; what
goes out does not depend on how text was cut into tokens. To make the last one true, the stop string
that *ends* first wins, the longest of those that end together.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_worker.engine.token_table import TokenTable


@dataclass(frozen=True)
class Piece:
    """Text that may go out, and the stop string that ended it, if one did."""

    text: str
    stop_matched: str | None = None


class Detokenizer:
    """Detokenizer of one choice.

    Args:
        table: bytes of tokens.
        stops: stop strings, none of them empty.
        min_tokens: stop strings are looked for only in what follows that many tokens.
    """

    def __init__(self, table: TokenTable, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._table, self._stops, self._min_tokens = table, tuple(stops), min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_tokens = 0
        self._held = ""

    def push(self, token_id: int) -> Piece:
        """Take the next token. After a stop string matched nothing may be pushed any more."""
        self._num_tokens += 1
        text = self._decoder.decode(self._table.text_bytes(token_id))
        if not self._stops or self._num_tokens <= self._min_tokens:
            return Piece(text)
        return self._search(self._held + text)

    def finish(self) -> str:
        """Return what was held back: the choice ended without a stop string."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return text

    def _search(self, text: str) -> Piece:
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return Piece(text[:start], stop)
        num_held = max(_overlap(text, stop) for stop in self._stops)
        border = len(text) - num_held
        self._held = text[border:]
        return Piece(text[:border])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of *text* that begins *stop*."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
