"""Text that is written in pieces: character escapes, base64 with signs in it, markup inside words.

Used by `headrace_guard.decode`, for input only: what is looked for here has no bounded beginning in
a text that grows. Each search is linear: patterns run in RE2, and a run of base64 that says nothing
is given up after a few characters.
"""

from __future__ import annotations

import binascii
import html
import re
from collections.abc import Callable, Iterator
from string import ascii_letters, digits

import re2

from headrace_guard.characters import decode_tag

# A stretch of the text and what it says.
Piece = tuple[int, int, str]

# \u0061 \u{61} \x61 \141 &#97; &#x61; %u0061, and of percent signs those that stand for letters,
# which no address needs, of equal signs two in a row. Several backslashes: JSON inside JSON.
_ESCAPE = (
    rb"\\+(?:u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]{1,6}\}|x[0-9A-Fa-f]{2}|[0-3][0-7]{2})"
    rb"|&#(?:[0-9]{2,7}|[xX][0-9A-Fa-f]{2,6});|%u[0-9A-Fa-f]{4}"
    rb"|%[46][1-9A-Fa-f]|%[57][0-9Aa]|(?:=[0-9A-F]{2}){2,}"
)
_HAS_ESCAPE = re2.compile(_ESCAPE)
_ESCAPED_RUN = re2.compile(rb"[^\s]*?(?:" + _ESCAPE + rb")[^\s]*")
_ESCAPES = re.compile(_ESCAPE.decode())
# Bold or code signs, a tag, a comment, colours of a terminal, the joint of two strings.
_SIGNS = rb"\*{1,3}|~~|`|<[!/A-Za-z][^<>\n]{0,80}>|\x1b\[[0-9;]{0,8}m|[\"'] ?[+.] ?[\"']|[^\n]\x08"
_MARKED_RUN = re2.compile(rb"[^\s]*[A-Za-z](?:" + _SIGNS + rb")[A-Za-z](?:" + _SIGNS + rb"|[^\s])*")
_MARKS = re.compile(_SIGNS.decode())
# "a*b" is a product.
_LEAST_WORD = 5
# How long what several runs say together may be; longer ones are shared out, with an overlap.
_MAX_CHARS, _OVERLAP = 8192, 128

_TOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2}")
# What prose does not have: words in a row with capitals or digits inside; many lone letters.
_MIXED = rb"[a-z]*(?:[a-z][A-Z0-9]|[0-9][A-Za-z]|[A-Z]{2}[a-z])[A-Za-z0-9+/]*"
_HINT = re2.compile(rb"(?:" + _MIXED + rb"[^A-Za-z0-9+/=]{1,5}){2}")
_LONE = re2.compile(rb"(?:\b[A-Za-z0-9+/][^A-Za-z0-9+/=]{1,5}){12,}(?:[A-Za-z0-9]\b)?")
_DIGITS = (ascii_letters + digits + "+/").encode()
_NO_DIGITS = bytes(set(range(256)) - set(_DIGITS))
# How far before a hint the run can begin.
_BEFORE_CHARS = 96
_MAX_SIGNS = 5
# Bytes after which a run of base64 must look like text, and least bytes of one that is text.
_LEAST_BYTES = 12
_MAX_DIGITS = 4096
_MIN_LETTER_RATIO = 0.8
_IS_TEXT = bytes(int(32 <= code < 127 or code in b"\t\n\r") for code in range(256))
_IS_LETTER = bytes(int(chr(code).isalpha() or chr(code).isspace()) for code in range(128)) + bytes(
    128
)

_SELECTED = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]{4,}")
_TAGS = re.compile("[\U000e0020-\U000e007e]{3,}")
_LOW_SELECTORS, _HIGH_SELECTORS, _NUM_LOW = 0xFE00, 0xE0100, 16


def escaped(text: str, data: bytes) -> Iterator[Piece]:
    """Find words with character escapes; what all say together, as one text.

    Args:
        text: where to look.
        data: the same, one byte a character.
    """
    if _HAS_ESCAPE.search(data) is not None:
        yield from _together(text, _ESCAPED_RUN.finditer(data), _unescaped)


def marked(text: str, data: bytes) -> Iterator[Piece]:
    """Find words with markup between their letters; what all say without it, as one text."""
    runs = _MARKED_RUN.finditer(data)
    yield from _together(text, runs, lambda run: _MARKS.sub("", run), _LEAST_WORD)


def selected(text: str) -> Iterator[tuple[int, int, bytes]]:
    """Find runs of variation selectors, which can stand for bytes that nobody sees."""
    for run in _SELECTED.finditer(text):
        codes = map(ord, run.group())
        said = bytes(
            code - _LOW_SELECTORS if code < _HIGH_SELECTORS else code - _HIGH_SELECTORS + _NUM_LOW
            for code in codes
        )
        yield run.start(), run.end(), said


def tagged(text: str) -> Iterator[Piece]:
    """Find words in tag characters, which nobody sees, that are glued to words that all see.

    Read in their place they would be the rest of those words, and none of their own.
    """
    for run in _TAGS.finditer(text):
        start, end = run.span()
        if text[start - 1 : start].isalnum() or text[end : end + 1].isalnum():
            yield start, end, "".join(map(decode_tag, run.group()))


def parted_base64(data: bytes) -> Iterator[Piece]:
    """Find base64 of ASCII text with spaces, dashes or quotes between its letters."""
    done = 0
    for hint in _HINT.finditer(data):
        begin = max(done, hint.start() - _BEFORE_CHARS)
        for token in _TOKEN.finditer(data, begin, hint.end()):
            if token.start() >= done:
                found = _longest(data, token.start())
                if found is not None:
                    yield token.start(), *found
                    done = found[0]
    for run in _LONE.finditer(data):
        joined = run.group().translate(None, _NO_DIGITS)
        for skipped in range(4):
            # A lone letter before the run moves all that follows.
            usable = joined[skipped:]
            usable = usable[: len(usable) - (len(usable) % 4 == 1)]
            said = _bytes_of(usable + b"=" * (-len(usable) % 4))
            if _all_text(said) and _has_letters(said):
                yield run.start(), run.end(), said.decode("ascii")
                break


def _longest(data: bytes, start: int) -> tuple[int, str] | None:
    """Return where the text that begins at *start* in pieces ends, and what it says."""
    read = b""
    end = 0
    best: tuple[int, str] | None = None
    for token in _TOKEN.finditer(data, start):
        is_far = end and token.start() - end > _MAX_SIGNS
        if is_far or read.endswith(b"=") or len(read) > _MAX_DIGITS:
            break
        checked, is_first, end = len(read) // 4 * 4, not read, token.end()
        read += token.group()
        if not _all_text(_bytes_of(read[checked : len(read) // 4 * 4])):
            break
        if len(read) // 4 * 3 >= _LEAST_BYTES:
            head = _bytes_of(read[: _LEAST_BYTES // 3 * 4])
            if not _has_letters(head):
                break
            said = _bytes_of(read + b"=" * (-len(read) % 4)) if len(read) % 4 != 1 else b""
            if said and not is_first and _all_text(said):
                best = end, said.decode("ascii")
    return best


def _bytes_of(run: bytes) -> bytes:
    try:
        return binascii.a2b_base64(run)
    except binascii.Error:
        return b"\x00"


def _all_text(said: bytes) -> bool:
    return 0 not in said.translate(_IS_TEXT)


def _has_letters(said: bytes) -> bool:
    return sum(said.translate(_IS_LETTER)) >= _MIN_LETTER_RATIO * len(said)


def _unescaped(run: str) -> str:
    return _ESCAPES.sub(lambda found: _char(found.group()), run)


def _char(escape: str) -> str:
    if escape[0] == "&":
        return html.unescape(escape)
    if escape[0] == "=":
        return bytes.fromhex(escape.replace("=", "")).decode("latin-1")
    digits = escape.lstrip("\\%")
    if digits[0] in "ux":
        code = int(digits[1:].strip("{}"), 16)
    else:
        code = int(digits, 16 if escape[0] == "%" else 8)
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else escape


def _together(
    text: str, runs: Iterator[re.Match[bytes]], undo: Callable[[str], str], least: int = 1
) -> Iterator[Piece]:
    start = end = 0
    said = ""
    for run in runs:
        shown = undo(text[run.start() : run.end()])
        if len(shown) < least:
            continue
        if said and len(said) + len(shown) > _MAX_CHARS:
            yield start, end, said
            said = said[-_OVERLAP:]
        elif not said:
            start = run.start()
        gap = " " if said else ""
        for begin in range(0, max(len(shown), 1), _MAX_CHARS):
            said += gap + shown[begin : begin + _MAX_CHARS]
            end, gap = run.end(), ""
            if begin + _MAX_CHARS < len(shown):
                yield start, end, said
                said = said[-_OVERLAP:]
    if said:
        yield start, end, said
