r"""Patterns that know their own beginnings.

A rule is written with these pieces instead of a regular expression, since a stream needs two
expressions of it: `full`, what the rule matches, and `prefix`, everything that any match can begin
with. Text is held back exactly while its tail matches a prefix; deriving both from one description
keeps them in step (a property test compares them). Both are in RE2's syntax, so matching takes
linear time whatever the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# Upper bound of a run or a repetition without one.
ENDLESS = -1


class Pattern(Protocol):
    """A piece of a rule."""

    def full(self) -> str:
        """Return the expression of whole matches."""
        ...

    def prefix(self) -> str:
        """Return the expression of all beginnings, from nothing to a whole match."""
        ...


@dataclass(frozen=True)
class Text:
    """Exactly this ASCII text."""

    literal: str
    ignores_case: bool = False

    def full(self) -> str:
        """Return the expression of whole matches."""
        return self._cased(re.escape(self.literal))

    def prefix(self) -> str:
        """Return the expression of all beginnings."""
        nested = ""
        for char in reversed(self.literal):
            nested = f"(?:{re.escape(char)}{nested})?"
        return self._cased(nested)

    def _cased(self, expression: str) -> str:
        return f"(?i:{expression})" if self.ignores_case else expression


@dataclass(frozen=True)
class Chars:
    """A run of characters of one class: ``Chars("0-9", 4)``, ``Chars("0-9A-F", 2, 8)``.

    Keep a bounded ``most`` below 100: RE2 copies the class. None = exactly ``least``.
    """

    members: str
    least: int = 1
    most: int | None = None

    def full(self) -> str:
        """Return the expression of whole matches."""
        return f"[{self.members}]{{{self.least},{self._most()}}}"

    def prefix(self) -> str:
        """Return the expression of all beginnings."""
        return f"[{self.members}]{{0,{self._most()}}}"

    def _most(self) -> str:
        return _bound(self.least if self.most is None else self.most)


@dataclass(frozen=True)
class Edge:
    """A word border (of ASCII words)."""

    def full(self) -> str:
        """Return the expression of whole matches."""
        return r"\b"

    def prefix(self) -> str:
        """Return the expression of all beginnings."""
        return ""


class Seq:
    """One piece after the other."""

    def __init__(self, *parts: Pattern) -> None:
        self._parts = parts

    def full(self) -> str:
        """Return the expression of whole matches."""
        return "".join(part.full() for part in self._parts)

    def prefix(self) -> str:
        """Return the expression of all beginnings."""
        nested = self._parts[-1].prefix()
        for part in reversed(self._parts[:-1]):
            nested = f"(?:{part.prefix()}|{part.full()}(?:{nested}))"
        return nested


class Either:
    """One of several pieces; the first that fits is taken."""

    def __init__(self, *parts: Pattern) -> None:
        self._parts = parts

    def full(self) -> str:
        """Return the expression of whole matches."""
        return _alternatives([part.full() for part in self._parts])

    def prefix(self) -> str:
        """Return the expression of all beginnings."""
        return _alternatives([part.prefix() for part in self._parts])


class Repeat:
    """A piece several times, as often as possible."""

    def __init__(self, part: Pattern, least: int, most: int) -> None:
        self._part, self._least, self._most = part, least, most

    def full(self) -> str:
        """Return the expression of whole matches."""
        return f"(?:{self._part.full()}){{{self._least},{_bound(self._most)}}}"

    def prefix(self) -> str:
        """Return the expression of all beginnings."""
        before = ENDLESS if self._most == ENDLESS else self._most - 1
        return f"(?:{self._part.full()}){{0,{_bound(before)}}}(?:{self._part.prefix()})"


def maybe(part: Pattern) -> Repeat:
    """Return *part*, or nothing."""
    return Repeat(part, 0, 1)


def words(*literals: str, ignores_case: bool = False) -> Either:
    """Return one of several texts; put longer ones before their own beginnings."""
    return Either(*(Text(literal, ignores_case) for literal in literals))


def _bound(most: int) -> str:
    return "" if most == ENDLESS else str(most)


def _alternatives(expressions: Sequence[str]) -> str:
    return f"(?:{'|'.join(expressions)})"
