"""What other classifiers find in the encoded texts of a growing output.

The input is there as a whole and is decoded as a whole (`headrace_guard.decode`). An output grows,
so this classifier says where an encoded text may still be going on: a run of base64 (also over
lines), pairs of hexadecimal digits, a word with percent signs, text turned round by a bidi sign.

A run of base64 counts only while what it says so far is text: most long words, hashes and pictures
are out of it after a few characters, and hold nothing back. A run that is out stays out, whatever
follows, so that the way of cutting makes no difference. ROT13 has no beginning and is not looked
for here; blocklists undo it word by word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import re2

from headrace_guard.classifiers.base import Classifier, Match
from headrace_guard.decode import carries_on, decoded, may_say_text
from headrace_guard.normalise import Mode, Window

_RUN = re2.compile(rb"[A-Za-z0-9+/_-]+={0,2}")
_MIN_RUN = 8
_NOTE = "encoded"
_LINE_BREAKS = frozenset({b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\n\r"})
_HEX = re2.compile(rb"(?:0x|\\x)?[0-9A-Fa-f]{2}(?:[ :,]?(?:0x|\\x)?[0-9A-Fa-f]{2}){5,}")
_OPEN_HEX = re2.compile(
    rb"(?:(?:0x|\\x)?[0-9A-Fa-f]{2}(?:[ :,]?(?:0x|\\x)?[0-9A-Fa-f]{2})*[ :,]?)?"
    rb"(?:0x?|\\x?|(?:0x|\\x)?[0-9A-Fa-f])?$"
)
_PERCENT = re2.compile(rb"(?:%[0-9A-Fa-f]{2}[^\s%]*){3,}")
_OPEN_PERCENT = re2.compile(rb"%[^\s]*$")
_TURNED = re.compile("[\u202e\u2067]([^\u202c\u2069\n]*)([\u202c\u2069\n]?)")


@dataclass(frozen=True, slots=True)
class _Region:
    """An encoded text; `is_open`: it may go on."""

    start: int
    end: int
    kind: str
    is_open: bool = False


class Encoded:
    """Finds what *inner* finds in encoded texts; the whole encoded text is the match.

    Args:
        inner: what to look for.
    """

    def __init__(self, inner: Sequence[Classifier]) -> None:
        self._inner = tuple(inner)

    def find(self, window: Window) -> list[Match]:
        """Every encoded text with something in it, once per thing."""
        return sorted(set(self._matches(window)))

    def live_from(self, window: Window) -> int:
        """Where the encoded text begins that may go on."""
        return min(
            [len(window.text), *(one.start for one in _regions(window) if one.is_open)],
        )

    def spans(self, window: Window) -> list[Match]:
        """Encoded texts that must not be cut in two, as if they were matches."""
        return [Match(one.start, one.end, "", one.kind, 0.0, one.start) for one in _regions(window)]

    def _matches(self, window: Window) -> Iterator[Match]:
        for region in _regions(window):
            text = window.text[region.start : region.end]
            for piece in decoded(text).pieces:
                if not piece.kinds.startswith(region.kind):
                    continue
                shown = Window(piece.text)
                for match in (found for one in self._inner for found in one.find(shown)):
                    yield replace(
                        match,
                        start=region.start,
                        end=region.end,
                        context_start=region.start,
                        detector=f"{match.detector}@{piece.kinds}",
                    )


def _regions(window: Window) -> tuple[_Region, ...]:
    # Asked for several times a window, and the same each time.
    found = window.notes.get(_NOTE)
    if not isinstance(found, tuple):
        found = window.notes[_NOTE] = tuple(_look(window))
    return found


def _look(window: Window) -> list[_Region]:
    data = window.text.encode("ascii", "replace")
    found = list(_base64(data, window.lefts[Mode.RAW.value]))
    found += (_Region(one.start(), one.end(), "hex") for one in _HEX.finditer(data))
    if b"%" in data:
        found += (_Region(one.start(), one.end(), "percent") for one in _PERCENT.finditer(data))
    if not window.is_final:
        found += _open_ends(data)
    if "\u202e" in window.text or "\u2067" in window.text:
        for one in _TURNED.finditer(window.text):
            is_open = not (one.group(2) or window.is_final)
            found.append(_Region(one.start(), one.end(1), "bidi", is_open))
    if window.is_final:
        found = [replace(one, is_open=False) for one in found]
    return found


def _open_ends(data: bytes) -> Iterator[_Region]:
    for pattern, kind in ((_OPEN_HEX, "hex"), (_OPEN_PERCENT, "percent")):
        found = pattern.search(data)
        if found is not None and found.start() < len(data):
            yield _Region(found.start(), len(data), kind, is_open=True)


def _base64(data: bytes, left: str) -> Iterator[_Region]:
    region: _Region | None = None
    for run in _RUN.finditer(data):
        start, end = run.span()
        reaches_end = end == len(data)
        if start == 0 and left and _RUN.fullmatch(left.encode("ascii", "replace")):
            # The rest of a run that is out.
            continue
        if region is not None:
            is_next_line = data[region.end : start] in _LINE_BREAKS
            if is_next_line and (end - start >= _MIN_RUN or reaches_end):
                longer = replace(region, end=end, is_open=reaches_end)
                if carries_on(data[region.start : region.end], data[start:end]):
                    region = longer
                    continue
            yield replace(region, is_open=False)
        alone = _Region(start, end, "base64", reaches_end)
        is_long = end - start >= _MIN_RUN or reaches_end
        region = alone if is_long and may_say_text(data[start:end]) else None
    if region is not None:
        rest = data[region.end :]
        yield replace(region, is_open=not rest or rest in _LINE_BREAKS)
