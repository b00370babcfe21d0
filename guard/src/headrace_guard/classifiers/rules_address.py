"""Postal addresses on one line: a house number and a street, and what makes them an address.

A street alone is no address ("in 1998 Wall Street fell"): a postal code must follow, or a word such
as "address" or "live at" must stand before it. English and German forms.
"""

import re

from headrace_guard.classifiers.pattern import Chars, Either, Repeat, Seq, Text, maybe, words
from headrace_guard.classifiers.rule import Rule

_KINDS = words(
    "Street", "St", "Avenue", "Ave", "Road", "Rd", "Boulevard", "Blvd", "Lane", "Ln", "Drive", "Dr",
    "Court", "Ct", "Place", "Square", "Terrace", "Crescent", "Close", "Parkway", "Highway", "Way",
)  # fmt: skip
_WORD = Seq(Chars("A-Z"), Chars(r"a-z'\-", 1, 20))
_STREET = Seq(
    Chars("0-9", 1, 5),
    maybe(Chars("A-Za-z")),
    Text(" "),
    Repeat(Seq(_WORD, Text(" ")), 1, 3),
    _KINDS,
    maybe(Text(".")),
    maybe(
        Seq(
            maybe(Text(",")),
            Text(" "),
            words("Apartment", "Apt", "Suite", "Unit", "Flat", "#"),
            Chars(". ", 0, 2),
            Chars("0-9A-Za-z", 1, 6),
        )
    ),
)
_TOWN = Seq(Chars(",\n", 0, 1), Chars(" \n", 0, 2), _WORD, Repeat(Seq(Text(" "), _WORD), 0, 2))
_CODE = Either(
    Seq(Chars("0-9", 5), maybe(Seq(Text("-"), Chars("0-9", 4)))),
    Seq(
        Chars("A-Z", 1, 2),
        Chars("0-9"),
        Chars("0-9A-Z", 0, 1),
        Text(" "),
        Chars("0-9"),
        Chars("A-Z", 2),
    ),
)
_CODED = Seq(_STREET, _TOWN, Chars(", ", 1, 2), maybe(Seq(Chars("A-Z", 2), Text(" "))), _CODE)
# The sharp s is one byte of its own here, see `rule._data`.
_GERMAN = Seq(
    Chars("A-Z"),
    Chars(r"a-z\-", 1, 24),
    words("strasse", "stra?e", "str.", "weg", "platz", "allee", "gasse"),
    Text(" "),
    Chars("0-9", 1, 4),
    maybe(Chars("a-z")),
    Chars(",\n ", 1, 3),
    Chars("0-9", 5),
    Text(" "),
    _WORD,
)
_NAMED = Seq(
    words(
        "address", "live at", "lives at", "living at", "reside at", "resides at", "ship to",
        "shipped to", "deliver to", "located at",
        ignores_case=True,
    ),
    Chars("A-Za-z:= ", 0, 12),
    maybe(Text("\n")),
    _STREET,
)  # fmt: skip
_NUMBER = re.compile(r"[0-9]")


def check_address(candidate: str) -> tuple[int, int] | None:
    """Return the span from the house number on; a German street comes before its number."""
    if candidate[0].isupper() and not candidate.lower().startswith(("address", "ship", "deliver")):
        return 0, len(candidate)
    number = _NUMBER.search(candidate)
    return None if number is None else (number.start(), len(candidate))


ADDRESS = Rule(
    "pii.address",
    Either(_CODED, _NAMED, _GERMAN),
    check=check_address,
    score=0.7,
)
