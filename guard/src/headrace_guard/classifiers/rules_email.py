"""E-mail addresses, with the length limits of RFC 5321."""

from headrace_guard.classifiers.pattern import Chars, Edge, Repeat, Seq, Text
from headrace_guard.classifiers.rule import Rule

_LOCAL = r"A-Za-z0-9._%+\-"

EMAIL = Rule(
    "pii.email",
    Seq(
        Chars(_LOCAL, 1, 64),
        Text("@"),
        Repeat(Seq(Chars(r"A-Za-z0-9\-", 1, 63), Text(".")), 1, 4),
        Chars("A-Za-z", 2, 24),
        Edge(),
    ),
    not_after=_LOCAL,
)
