"""Encoded text inside a text: base64, hex, percent signs, ROT13, text turned round by bidi signs.

What decodes to readable text is a text of its own, to be judged on its own: beside its wrapper a
short payload would be diluted. Bounded in depth, in number and in size; what lies beyond a bound is
not decoded, and `Decoding.is_complete` says so.
"""

from __future__ import annotations

import binascii
import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import unquote_to_bytes

import re2

from headrace_guard.classifiers.base import Match

MAX_DEPTH = 2
MAX_CHARS = 16_384
MAX_PIECES = 64
_MIN_TEXT = 4
# In linear time over one byte per character, so that positions are the same. An encoded text has
# at least eight characters; shorter runs decode to text by chance.
_BASE64 = re2.compile(rb"[A-Za-z0-9+/_-]{8,}(?:[\r\n]{1,2}[A-Za-z0-9+/_-]{8,})*={0,2}")
_HEX = re2.compile(rb"(?:0x|\\x)?[0-9A-Fa-f]{2}(?:[ :,]?(?:0x|\\x)?[0-9A-Fa-f]{2}){5,}")
_HEX_MARK = re.compile(rb"0x|\\x|[ :,]")
_PERCENT = re2.compile(rb"[^\s%]*(?:%[0-9A-Fa-f]{2}[^\s%]*){3,}")
_TURNED = re.compile("[\u202e\u2067]([^\u202c\u2069\n]+)")
_ROT13_WORDS = re2.compile(rb"(?i)\b(?:gur|naq|lbhe?|guvf|gung|jvgu|sbe|ner|abg|ubj|jung|nyy)\b")
_ENGLISH_WORDS = re2.compile(rb"(?i)\b(?:the|and|your?|this|that|with|for|are|not|how|what|all)\b")
# Share of printable characters from which bytes are taken for text.
_MIN_READABLE_RATIO = 0.9
_MIN_LETTER_RATIO = 0.5
# So many bytes in a row are not ASCII by chance.
_SURE_BYTES = 12


@dataclass(frozen=True, slots=True)
class Decoded:
    """A text that was encoded.

    Args:
        text: what it says.
        start: where the encoded text begins in the original.
        end: behind it.
        kinds: what was undone, outermost first, e.g. "base64" or "base64+hex".
    """

    text: str
    start: int
    end: int
    kinds: str


@dataclass(frozen=True, slots=True)
class Decoding:
    """All that was decoded. `is_complete`: no bound cut anything off."""

    pieces: tuple[Decoded, ...]
    is_complete: bool = True


def decoded(text: str) -> Decoding:
    """Return the readable texts that *text* holds in encoded form, inner ones too."""
    pieces: list[Decoded] = []
    level = [Decoded(text, 0, len(text), "")]
    is_complete = True
    for _ in range(MAX_DEPTH):
        inner: list[Decoded] = []
        for outer in level:
            for start, end, kind, shown in _found(outer.text):
                if len(pieces) + len(inner) >= MAX_PIECES:
                    return Decoding((*pieces, *inner), False)
                is_complete = is_complete and len(shown) <= MAX_CHARS
                place = (outer.start, outer.end) if outer.kinds else (start, end)
                kinds = f"{outer.kinds}+{kind}".lstrip("+")
                inner.append(Decoded(shown[:MAX_CHARS], *place, kinds))
        pieces += inner
        level = inner
    return Decoding(tuple(pieces), is_complete)


def placed(match: Match, piece: Decoded) -> Match:
    """Return a match in a decoded text as one of the encoded text as a whole."""
    return replace(
        match,
        start=piece.start,
        end=piece.end,
        context_start=piece.start,
        detector=f"{match.detector}@{piece.kinds}",
    )


def _found(text: str) -> Iterator[tuple[int, int, str, str]]:
    data = text.encode("ascii", "replace")
    for kind, pattern, decode in _KINDS:
        for found in pattern.finditer(data):
            start, end = found.span()
            shown = decode(data[start:end])
            if shown is not None:
                yield start, end, kind, shown
    if "\u202e" in text or "\u2067" in text:
        for turned in _TURNED.finditer(text):
            yield turned.start(), turned.end(), "bidi", turned.group(1)[::-1]
    if _looks_turned_by_13(data[:MAX_CHARS]):
        yield 0, len(text), "rot13", codecs.encode(text, "rot13")


def _looks_turned_by_13(data: bytes) -> bool:
    first = _ROT13_WORDS.search(data)
    if first is None or _ROT13_WORDS.search(data, first.end()) is None:
        return False
    return _ENGLISH_WORDS.search(data) is None


def _from_base64(run: bytes) -> str | None:
    digits = run.translate(_BASE64_DIGITS, b"\r\n=")
    usable = digits[: len(digits) - (len(digits) % 4 == 1)]
    try:
        return _readable(binascii.a2b_base64(usable + b"=" * (-len(usable) % 4)))
    except binascii.Error:
        return None


def _from_hex(run: bytes) -> str | None:
    digits = _HEX_MARK.sub(b"", run).decode("ascii")
    return _readable(bytes.fromhex(digits[: len(digits) // 2 * 2]))


def _from_percent(run: bytes) -> str | None:
    return _readable(unquote_to_bytes(run))


_BASE64_DIGITS = bytes.maketrans(b"-_", b"+/")
_KINDS = (
    ("base64", _BASE64, _from_base64),
    ("hex", _HEX, _from_hex),
    ("percent", _PERCENT, _from_percent),
)


def _readable(data: bytes) -> str | None:
    """Return *data* as text if it is text at all: mostly printable, with letters."""
    if len(data) < _MIN_TEXT:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return _wide_text(data)
    num_printable = sum(char.isprintable() or char.isspace() for char in text)
    num_letters = sum(char.isalpha() or char.isspace() for char in text)
    is_sure = text.isascii() and len(data) >= _SURE_BYTES
    if num_printable < _MIN_READABLE_RATIO * len(text):
        return _wide_text(data)
    return text if is_sure or num_letters >= _MIN_LETTER_RATIO * len(text) else None


def _wide_text(data: bytes) -> str | None:
    """Return UTF-16 text, as some shells encode it, if it is all ASCII."""
    if len(data) % 2 or any(data[1::2]):
        return None
    text = data[::2].decode("ascii", "ignore")
    return text if len(text) == len(data) // 2 and text.isprintable() else None
