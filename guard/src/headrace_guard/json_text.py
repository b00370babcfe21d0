r"""Text in JSON, as whoever parses it reads it.

Results of tools are JSON more often than not, and what programs send for their users. What a model
that looks for instructions should see of ``{"id": 7, "body": "Dear all,\nthe lift ..."}`` is a
mail of two lines: its strings, a line each, with their escapes undone. Names of fields and other
single words are left out, and numbers. JSON inside a string is read the same way, and so is JSON
that stands among other text, which stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import re2

from headrace_guard.normalise import View

# JSON by its tokens, in any order, cut off anywhere: nobody promises that it is well formed.
_A_STRING = rb'"(?:[^"\\]|\\(?s:.))*"'
_REST = (
    rb"(?:\s|" + _A_STRING + rb"|[\[\]{},:]|-?[0-9][0-9.eE+-]*|true|false|null)*"
    rb'(?:"(?:[^"\\]|\\(?s:.))*\\?)?'
)
_TOKENS = re2.compile(rb"\s*[\[{]" + _REST)
# Among other text it must begin like JSON: a name and a colon, or a string or an object in a list.
_AMONG = re2.compile(
    rb"(?:\{\s*" + _A_STRING + rb"\s*:|\[\s*(?:\{\s*\"|" + _A_STRING + rb"\s*[,\]]))" + _REST
)
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"?', re.DOTALL)
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\.", re.DOTALL
)
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_UNKNOWN = "\ufffd"
# Single words up to this length are names of fields, states and kinds.
_MAX_NAME_CHARS = 20
_MAX_DEPTH = 3


def undone(escape: str) -> str:
    """Return what an escape stands for; several backslashes before its letter count as one."""
    digits = escape.lstrip("\\")
    if len(digits) < len("xFF"):
        return _SHORT.get(digits, digits)
    high, _, low = digits[1:].partition("\\")
    if low:
        both = int(high, 16).to_bytes(2, "big") + int(low.lstrip("\\")[1:], 16).to_bytes(2, "big")
        return both.decode("utf-16-be")
    char = chr(int(high, 16))
    return _UNKNOWN if "\ud800" <= char <= "\udfff" else char


def strings_of(view: View) -> View | None:
    """Return a text with JSON in it by the JSON's strings, a line each; None = there are none."""
    places: Sequence[int] = range(len(view.text))
    said = _said(view.text, places, 0) or _said_among(view.text, places)
    if said is None:
        return None
    origins = view.all_origins()
    return View.of(said[0], [origins[place] for place in said[1]], view.left)


def _said(text: str, places: Sequence[int], depth: int) -> tuple[str, list[int]] | None:
    """Return the strings, and the place of each character; None = it is not JSON, or has none."""
    if depth > _MAX_DEPTH or _TOKENS.fullmatch(text.encode("ascii", "replace")) is None:
        return None
    lines: list[str] = []
    found: list[int] = []
    for string in _STRING.finditer(text):
        line, line_places = _without_escapes(text, places, *string.span(1))
        if len(line) <= _MAX_NAME_CHARS and len(line.split()) < 2:
            continue
        inner = _said(line, line_places, depth + 1)
        line, line_places = inner or (line, line_places)
        if lines:
            lines.append("\n")
            found.append(places[string.start()])
        lines.append(line)
        found += line_places
    return ("".join(lines), found) if lines else None


def _said_among(text: str, places: Sequence[int]) -> tuple[str, list[int]] | None:
    """Return the strings of JSON and what stands around it, a line each; None = there is none."""
    if '"' not in text:
        return None
    parts: list[str] = []
    found: list[int] = []
    done = 0
    # One byte per character, so that positions are the same.
    for region in _AMONG.finditer(text.encode("ascii", "replace")):
        start, end = region.span()
        said = _said(text[start:end], places[start:end], 0)
        if said is None:
            continue
        parts += (text[done:start], "\n", said[0], "\n")
        found += (*places[done:start], places[start], *said[1], places[end - 1])
        done = end
    if not parts:
        return None
    parts.append(text[done:])
    return "".join(parts), found + list(places[done:])


def _without_escapes(
    text: str, places: Sequence[int], start: int, end: int
) -> tuple[str, list[int]]:
    parts: list[str] = []
    found: list[int] = []
    done = start
    for escape in _ESCAPE.finditer(text, start, end):
        begin, stop = escape.span()
        char = "\\" if escape.group() == "\\\\" else undone(escape.group())
        parts += (text[done:begin], char)
        found += (*places[done:begin], *([places[begin]] * len(char)))
        done = stop
    parts.append(text[done:end])
    found += places[done:end]
    return "".join(parts), found
