"""Copies of rows in disguise, to learn from: what a disguise leaves behind must not mean guilt.

Most of a disguise is undone before a model reads a text (`headrace_guard.canonical`); what remains
are words that came out wrong. Clean rows and positives get the same share of copies. A copy keeps
its row's source, so that it is left out with it, and it is never judged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace_guard_train.rows import Row

COPIED_RATIO = 0.06
# Longer texts are documents: nobody disguises all of one.
MAX_CHARS = 600
_LOOKALIKES = str.maketrans("aeopcxyi", "\u0430\u0435\u043e\u0440\u0441\u0445\u0443\u0456")
_LEET = str.maketrans("aeiost", "4310$7")
_WIDE = str.maketrans({code: code + 0xFEE0 for code in range(0x21, 0x7F)})


def with_copies(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return the rows, and copies of some of them in disguise behind them."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    fit = [row for row in rows if not row.spans and len(row.text) <= MAX_CHARS]
    chosen = rng.sample(fit, int(COPIED_RATIO * len(fit)))
    return [*rows, *(replace(row, text=rng.choice(DISGUISES)(row.text, rng)) for row in chosen)]


def _by_word(text: str, change: Callable[[str], str], rng: random.Random) -> str:
    share = rng.choice((0.3, 0.6, 1.0))
    return " ".join(change(word) if rng.random() < share else word for word in text.split(" "))


def _lookalikes(text: str, rng: random.Random) -> str:
    return _by_word(text, lambda word: word.translate(_LOOKALIKES), rng)


def _leet(text: str, rng: random.Random) -> str:
    return _by_word(text, lambda word: word.translate(_LEET), rng)


def _wide(text: str, rng: random.Random) -> str:
    return _by_word(text, lambda word: word.translate(_WIDE), rng)


def _accents(text: str, rng: random.Random) -> str:
    return _by_word(text, "\u0301".join, rng)


def _invisible(text: str, rng: random.Random) -> str:
    return rng.choice("\u200b\u200d\u00ad\u2060").join(text)


def _spaced(text: str, rng: random.Random) -> str:
    return _by_word(text, rng.choice((" ", ".", "-")).join, rng)


def _parted(text: str, rng: random.Random) -> str:
    """Put a sign or a space into some words."""

    def part(word: str) -> str:
        if len(word) < 4:
            return word
        at = rng.randrange(1, len(word) - 1)
        return word[:at] + rng.choice("-* ._") + word[at:]

    return _by_word(text, part, rng)


def _doubled(text: str, rng: random.Random) -> str:
    return _by_word(text, lambda word: "".join(one * rng.choice((1, 1, 2)) for one in word), rng)


def _swapped(text: str, rng: random.Random) -> str:
    """Turn two letters round inside some words, as one reads over."""

    def swap(word: str) -> str:
        if len(word) < 5:
            return word
        at = rng.randrange(1, len(word) - 2)
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]

    return _by_word(text, swap, rng)


def _loud(text: str, rng: random.Random) -> str:
    return _by_word(text, str.upper, rng) + rng.choice(("", "!!!", " ...", " \U0001f600"))


DISGUISES: tuple[Callable[[str, random.Random], str], ...] = (
    _lookalikes, _leet, _wide, _accents, _invisible, _spaced, _parted, _doubled, _swapped, _loud,
)  # fmt: skip
