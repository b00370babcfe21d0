"""Harmless documents of any length and kind, and documents with something foreign put into them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_guard_train.grammar import Grammar

KINDS = (
    "mail", "news", "manual", "readme", "recipe", "minutes", "review", "story", "science", "code",
    "table", "chatlog",
)  # fmt: skip
_BY_LINE = frozenset(
    {"code", "table", "chatlog", "faq", "exam", "ticket", "dialog", "tool_result", "source_file"}
)


class Documents:
    """Makes documents.

    Args:
        data: content of documents.toml, or more.
        kinds: which of its kinds to make.
    """

    def __init__(self, data: Mapping[str, Any], kinds: Sequence[str]) -> None:  # Any: TOML
        self._data, self._kinds = data, tuple(kinds)
        self._grammar = Grammar(data["slots"], frozenset())

    def make(self, rng: random.Random) -> str:
        """Return one harmless document of 100 to about 3,000 characters."""
        return "\n".join(self._lines(rng))

    def in_chat(self, rng: random.Random) -> str:
        """Return a document as somebody pastes it into a chat, with a request before or behind."""
        request = rng.choice(self._data["around"]["before"])
        text = self.make(rng)
        return f"{request}\n\n{text}" if rng.random() < 0.75 else f"{text}\n\n{request}"

    def with_insertion(self, foreign: str, rng: random.Random) -> tuple[str, int]:
        """Return a document with *foreign* as a line of its own, and where that begins."""
        lines = self._lines(rng)
        at = rng.choice([0, len(lines), rng.randint(0, len(lines))])
        before, after = "\n".join(lines[:at]), "\n".join(lines[at:])
        gap = rng.choice(["\n", "\n", "\n\n", " "])
        head = before + gap if before else ""
        return head + foreign + (gap + after if after else ""), len(head)

    def _lines(self, rng: random.Random) -> list[str]:
        kind = rng.choice(self._kinds)
        parts = self._data[kind]
        count = rng.choice([3, 5, 8, 12, 20, 30])
        body = [self._grammar.expand(rng.choice(parts["sentences"]), rng) for _ in range(count)]
        if kind not in _BY_LINE:
            body = _paragraphs(body, rng)
        opening = self._grammar.expand(rng.choice(parts["open"]), rng)
        closing = self._grammar.expand(rng.choice(parts["close"]), rng)
        return [line for line in (opening, *body, closing) if line]


def _paragraphs(sentences: list[str], rng: random.Random) -> list[str]:
    found: list[str] = []
    at = 0
    while at < len(sentences):
        size = rng.randint(1, 5)
        found.append(" ".join(sentences[at : at + size]))
        at += size
    return found
