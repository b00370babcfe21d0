"""Encoded text inside a text: base64, hex, percent signs, ROT13, text turned round, escapes.

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
from typing import Any
from urllib.parse import unquote_to_bytes

import re2

from headrace_guard.classifiers.base import Match
from headrace_guard.normalise import Mode, view_of
from headrace_guard.pieced import escaped, marked, parted_base64, selected, tagged

MAX_DEPTH = 4
MAX_CHARS = 16_384
MAX_PIECES = 256
_OVERLAP = 256
_MIN_TEXT = 4
# In linear time over one byte per character, so that positions are the same. An encoded text has
# at least eight characters; shorter runs decode to text by chance.
_BASE64 = re2.compile(rb"[A-Za-z0-9+/_-]{8,}(?:[\r\n]{1,2}[A-Za-z0-9+/_-]{8,})*={0,2}")
_HEX = re2.compile(rb"(?:0x|\\x)?[0-9A-Fa-f]{2}(?:[ :,;\r\n-]{0,2}(?:0x|\\x)?[0-9A-Fa-f]{2}){5,}")
_HEX_MARK = re.compile(rb"0x|\\x|[ :,;\r\n-]")
_PERCENT = re2.compile(rb"[^\s%]*(?:%[0-9A-Fa-f]{2}[^\s%]*){3,}")
_TURNED = re.compile("[\u202e\u2067]([^\u202c\u2069\n]+)")
_PARTLY_TURNED = re.compile("(\\w*)[\u202e\u2067]([^\u202c\u2069\n]+)[\u202c\u2069](\\w*)")
_ROT13_WORDS = re2.compile(rb"(?i)\b(?:gur|naq|lbhe?|guvf|gung|jvgu|sbe|ner|abg|ubj|jung|nyy)\b")
# None of these is a word of another language.
_REVERSED_WORDS = re2.compile(
    rb"(?i)\b(?:eht|uoy|ruoy|siht|taht|htiw|tahw|lliw|hcihw|esaelp|erehw|eseht|tuoba)\b"
)
_ENGLISH_WORDS = re2.compile(rb"(?i)\b(?:the|and|your?|this|that|with|for|are|not|how|what|all)\b")
# Share of printable characters from which bytes are taken for text.
_MIN_READABLE_RATIO = 0.9
_MIN_LETTER_RATIO = 0.5
_BASE64_PHASES = 4
_LINE = re.compile(rb"[^\r\n]+")
# How much of the lines before is looked at to see whether a line belongs to them.
_JOINED_CHARS = 256
# No text has these.
_CONTROL = re2.compile(rb"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")
_INNER_BYTES = bytes(range(0x80, 0xC0))
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
    for depth in range(MAX_DEPTH + 1):
        inner: list[Decoded] = []
        for outer in level:
            for start, end, kind, shown in _found(outer.text):
                if depth == MAX_DEPTH or len(pieces) + len(inner) >= MAX_PIECES:
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


def may_say_text(run: bytes) -> bool:
    """Whether a run of base64 that may go on can be that of a text, from any of four places on."""
    digits = run.translate(_BASE64_DIGITS, b"\r\n=")
    return any(_may_begin_text(digits[skipped:]) for skipped in range(_BASE64_PHASES))


def carries_on(before: bytes, line: bytes) -> bool:
    """Whether a line of base64 can be the rest of the text that the lines before it begin.

    A word that ends the line above base64 is made of the same letters, and does not belong to it.
    """
    return not before.rstrip(b"\r\n").endswith(b"=") and may_say_text(
        before[-_JOINED_CHARS:] + line
    )


def _may_begin_text(digits: bytes) -> bool:
    try:
        said = binascii.a2b_base64(digits[: len(digits) // 4 * 4])
        # The first bytes may be the rest of a letter.
        codecs.getincrementaldecoder("utf-8")().decode(said.lstrip(_INNER_BYTES))
    except (binascii.Error, UnicodeDecodeError):
        return False
    return _CONTROL.search(said) is None


def _found(text: str) -> Iterator[tuple[int, int, str, str]]:
    data = text.encode("ascii", "replace")
    yield from _runs(text, data)
    if "\u202e" in text or "\u2067" in text:
        for turned in _TURNED.finditer(text):
            yield turned.start(), turned.end(), "bidi", turned.group(1)[::-1]
        for word in _PARTLY_TURNED.finditer(text):
            shown = word.group(1) + word.group(2)[::-1] + word.group(3)
            yield word.start(), word.end(), "bidi", shown
    if _looks_turned(data[:MAX_CHARS], _ROT13_WORDS):
        for start, end in _stretches(len(text)):
            yield start, end, "rot13", codecs.encode(text[start:end], "rot13")
    if _looks_turned(data[:MAX_CHARS], _REVERSED_WORDS):
        for start, end in _stretches(len(text)):
            yield start, end, "reversed", text[start:end][::-1]
    if not text.isascii():
        yield from _found_beneath(text)


def _stretches(num_chars: int) -> Iterator[tuple[int, int]]:
    """Yield where the stretches of a long text lie that are read one by one; they overlap."""
    for start in range(0, max(num_chars - _OVERLAP, 1), MAX_CHARS - _OVERLAP):
        yield start, min(start + MAX_CHARS, num_chars)


def _runs(text: str, data: bytes) -> Iterator[tuple[int, int, str, str]]:
    for start, end in _places(_BASE64.finditer(data), data):
        shown = _from_base64(data[start:end])
        if shown is not None:
            yield start, end, "base64", shown
    for start, end, shown in _hex(data):
        yield start, end, "hex", shown
    for run in _PERCENT.finditer(data):
        shown = _readable(unquote_to_bytes(run.group()))
        if shown is not None:
            yield run.start(), run.end(), "percent", shown
    for kind, pieces in (
        ("escapes", escaped(text, data)),
        ("markup", marked(text, data)),
        ("base64", parted_base64(data)),
    ):
        for start, end, shown in pieces:
            yield start, end, kind, shown


def _found_beneath(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Yield what is encoded in letters of another form, or with characters that do not show."""
    for start, end, said in selected(text):
        shown = _readable(said)
        if shown is not None:
            yield start, end, "selectors", shown
    for start, end, shown in tagged(text):
        yield start, end, "tags", shown
    view = view_of(text, Mode.DECODED, is_folded=False)
    if view.text != text:
        for start, end, kind, shown in _runs(view.text, view.text.encode("ascii", "replace")):
            if shown not in text:
                yield *view.span(start, end), kind, shown


def _places(runs: Iterator[Any], data: bytes) -> Iterator[tuple[int, int]]:  # Any: no types
    """Return where encoded texts stand; lines that do not belong together count alone."""
    for run in runs:
        start, end = run.span()
        lines = [
            (start + one.start(), start + one.end()) for one in _LINE.finditer(data[start:end])
        ]
        for begin, stop in lines[1:]:
            if not carries_on(data[start:begin], data[begin:stop]):
                yield start, begin
                start = begin
        yield start, end


def _looks_turned(data: bytes, words: Any) -> bool:  # Any: no types
    first = words.search(data)
    if first is None or words.search(data, first.end()) is None:
        return False
    return _ENGLISH_WORDS.search(data) is None


def _from_base64(run: bytes) -> str | None:
    digits = run.translate(_BASE64_DIGITS, b"\r\n=")
    for skipped in range(_BASE64_PHASES):
        # A letter put before the run moves all that follows; then only what is surely text counts.
        text = _from_digits(digits[skipped:])
        if text is not None and (not skipped or _is_sure(text)):
            return text
    text = _from_digits(digits[::-1])
    return text if text is not None and _is_sure(text) else None


def _is_sure(text: str) -> bool:
    return text.isascii() and len(text) >= _SURE_BYTES


def _from_digits(digits: bytes) -> str | None:
    usable = digits[: len(digits) - (len(digits) % 4 == 1)]
    try:
        return _readable(binascii.a2b_base64(usable + b"=" * (-len(usable) % 4)))
    except binascii.Error:
        return None


def _hex(data: bytes) -> Iterator[tuple[int, int, str]]:
    for run in _HEX.finditer(data):
        shown = _from_hex(run.group())
        if shown is not None:
            yield run.start(), run.end(), shown
            continue
        # Lines that say nothing together may do so alone.
        for line in _LINE.finditer(run.group()) if b"\n" in run.group() else ():
            shown = _from_hex(line.group())
            if shown is not None:
                yield run.start() + line.start(), run.start() + line.end(), shown


def _from_hex(run: bytes) -> str | None:
    digits = _HEX_MARK.sub(b"", run).decode("ascii")
    text = _readable(bytes.fromhex(digits[: len(digits) // 2 * 2]))
    if text is not None:
        return None if digits.isdigit() and not _all_letters(text) else text
    moved = digits[1:]
    text = _readable(bytes.fromhex(moved[: len(moved) // 2 * 2]))
    return text if text is not None and _is_sure(text) and not digits.isdigit() else None


def _all_letters(text: str) -> bool:
    """Whether a text is none that a table of numbers of two digits gives by chance."""
    num_letters = sum(char.isalpha() or char.isspace() for char in text)
    return num_letters >= _MIN_READABLE_RATIO * len(text)


_BASE64_DIGITS = bytes.maketrans(b"-_", b"+/")


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
