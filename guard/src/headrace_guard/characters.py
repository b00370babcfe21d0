"""What the guard knows of single characters: invisible ones, marks, letters that form words.

Everything here is a function of one character alone. That is what makes normalising safe in a
stream: what a text becomes does not change when more text follows (see `headrace_guard.normalise`).
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

_TAG_FIRST, _TAG_LAST = 0xE0020, 0xE007E
# Shown as nothing by most renderers, but not of category Cf or Cc (Unicode: Default_Ignorable).
_IGNORABLE = (
    (0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2065, 0x2065),
    (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0xE0000, 0xE0FFF),
)  # fmt: skip
# Scripts written without spaces, or (Hangul) with endings glued to the word: no word borders.
_UNSPACED = (
    (0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1100, 0x11FF), (0x1780, 0x17FF),
    (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3040, 0x30FF), (0x3130, 0x318F), (0x31F0, 0x31FF),
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA960, 0xA97F), (0xAC00, 0xD7FF), (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F), (0x20000, 0x3FFFF),
)  # fmt: skip
_FIRST_ACCENT_CLASS = 200
# Combining classes of marks that carry meaning of their own: nukta, kana voicing, virama and the
# vowels and tones of Thai, Lao and Tibetan lie outside these; overlays, Hebrew and Arabic points
# and the general accents (200 and up) inside.
_DROPPED_CLASSES = frozenset({1, *range(10, 37)})


def _within(code: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(first <= code <= last for first, last in ranges)


def is_tag(char: str) -> bool:
    """Whether *char* is a tag character that stands for a printable ASCII one."""
    return _TAG_FIRST <= ord(char) <= _TAG_LAST


def decode_tag(char: str) -> str:
    """Return the ASCII character that a tag character stands for."""
    return chr(ord(char) - 0xE0000)


@lru_cache(maxsize=4096)
def is_invisible(char: str) -> bool:
    """Whether *char* shows as nothing: format and control characters, selectors, fillers, tags."""
    if char.isspace():
        return False
    return unicodedata.category(char) in ("Cf", "Cc") or _within(ord(char), _IGNORABLE)


@lru_cache(maxsize=4096)
def is_dropped_mark(char: str) -> bool:
    """Whether *char* is an accent, a point or a frame that can disguise any letter."""
    combining = unicodedata.combining(char)
    if combining >= _FIRST_ACCENT_CLASS or combining in _DROPPED_CLASSES:
        return True
    return not combining and unicodedata.category(char) == "Me"


@lru_cache(maxsize=4096)
def forms_words(char: str) -> bool:
    """Whether two such characters side by side belong to one word (false for CJK and the like)."""
    if char.isascii():
        return char.isalnum()
    if _within(ord(char), _UNSPACED):
        return False
    return char.isalnum() or unicodedata.category(char).startswith("M")
