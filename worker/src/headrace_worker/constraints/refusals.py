"""Why a constraint is refused, in our words: the library's are about its own inside. Pure.

Of its text only what quotes the client's constraint goes further: names of keywords, numbers, a
place in the grammar. What is not known here is told in general; the debug log has it all.
"""

from __future__ import annotations

import logging
import re

from headrace_common.errors import InvalidRequest

_log = logging.getLogger(__name__)
_MAX_QUOTED_CHARS = 120
_UNKNOWN = "it is not well formed, or asks for what cannot be enforced"

_STATES = "it is too complex: it has too many states"
_PATTERN = (
    "a pattern is wrong, or asks for what cannot be enforced (looking around, word borders, "
    "^ and $ inside)"
)
# What is in the library's first line, and our words for it; {0} is what it quotes of the client's.
_WORDS = (
    (r"^Unimplemented keys: \[(.*)\]$", "these keywords cannot be enforced: {0}"),
    (r"^Unknown format: (.*)$", "the format {0!r} is not known"),
    (r"^Invalid type: (.*)$", "{0!r} is no type of JSON"),
    (r"^Pointer '(.*)' does not exist$", "$ref leads to {0!r}, which is not there"),
    (r"^Resource '(.*?)' ", "$ref leads out of the schema, to {0!r}"),
    (r"^oneOf constraints ", "oneOf cannot be enforced where two may fit; use anyOf"),
    (r"^Expected .* for '(.*?)', got ", "{0} has a value of the wrong kind"),
    (r"^(\$?\w+) must be an? ", "{0} has a value of the wrong kind"),
    (r"^invalid multiple of$", "multipleOf must be above 0"),
    (
        r"^min/maxProperties only supported ",
        "minProperties and maxProperties cannot be enforced beside properties that may be left out",
    ),
    (r"^Unsatisfiable schema: required property '(.*)'", "nothing can fit the property {0!r}"),
    (r"^Unsatisfiable schema: (\w+ \([^()]*\) is .*)$", "nothing can fit: {0}"),
    (r"^Unsatisfiable schema: |^NoExtension|^range end must", "nothing can fit it"),
    (r"too many (lexer )?states|^LexerTooComplex|[Tt]oo many items|too large|too big", _STATES),
    (r"regex parse error|[Ll]ook-?around", _PATTERN),
    (r"unknown name: (\".*\")$", "the grammar has no rule {0}"),
    (r"^no start rule found$", "the grammar has no rule 'start'"),
)
# A place in a grammar, by line and column.
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): (?:failed to compile JSON schema: )?")


def told(what: str, error: str) -> InvalidRequest:
    """Return the library's *error* about the client's own constraint as ours."""
    # It quotes the client, so it is for whoever looks for it.
    _log.debug("%s: %s", what, error[:1000])
    return InvalidRequest(f"{what}: {in_our_words(error)}.", param="constraint")


def in_our_words(error: str) -> str:
    """Say what the library's text means, in one line."""
    line = " ".join((error.strip().splitlines() or [""])[0].split())
    place = _PLACE.match(line)
    line = line[place.end() :] if place else line
    words = _UNKNOWN if place is None else "the grammar cannot be read"
    for pattern, ours in _WORDS:
        if found := re.search(pattern, line):
            words = ours.format(*(group[:_MAX_QUOTED_CHARS] for group in found.groups("")))
            break
    return words if place is None else f"{words} (line {place[1]}, column {place[2]})"
