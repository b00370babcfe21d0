"""Telephone numbers: international ones with "+", and North American ones with their separators.

Bare runs of digits are left alone: without a check digit they would hit orders, dates and amounts.
"""

from headrace_guard.classifiers.pattern import Chars, Edge, Either, Repeat, Seq, Text, maybe
from headrace_guard.classifiers.rule import Rule

_MIN_DIGITS, _MAX_DIGITS = 8, 15
_GAP = Chars(r" .\-", 0, 1)


def check_phone(candidate: str) -> tuple[int, int] | None:
    """Accept E.164 lengths, and area and exchange codes that the North American plan allows."""
    digits = "".join(char for char in candidate if char.isdigit())
    if candidate.startswith("+"):
        is_valid = _MIN_DIGITS <= len(digits) <= _MAX_DIGITS and digits[0] != "0"
        return (0, len(candidate)) if is_valid else None
    national = digits[-10:]
    return (0, len(candidate)) if national[0] in "23456789" and national[3] in "23456789" else None


_INTERNATIONAL = Seq(
    Text("+"),
    Chars("0-9", 1, 3),
    Repeat(Seq(_GAP, maybe(Text("(")), Chars("0-9", 1, 4), maybe(Text(")"))), 2, 6),
)
_NORTH_AMERICAN = Seq(
    maybe(Seq(Text("1"), Chars(r" .\-"))),
    Either(
        Seq(Text("("), Chars("0-9", 3), Text(")"), maybe(Text(" "))),
        Seq(Chars("0-9", 3), Chars(r" .\-")),
    ),
    Chars("0-9", 3),
    Chars(r" .\-"),
    Chars("0-9", 4),
)

PHONE = Rule(
    "pii.phone",
    Seq(Either(_INTERNATIONAL, _NORTH_AMERICAN), Edge()),
    check=check_phone,
    not_after=r"A-Za-z0-9_.+\-",
    score=0.8,
)
