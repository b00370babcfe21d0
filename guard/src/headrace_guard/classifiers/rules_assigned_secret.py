"""A value that looks random, assigned to a name that says it is secret: password = "q8!fLs..."."""

import math
from collections import Counter

from headrace_guard.classifiers.pattern import Chars, Either, Seq, maybe, words
from headrace_guard.classifiers.rule import Rule

_MIN_BITS_PER_CHAR = 2.8
_MIN_KINDS = 2
_MIN_KINDS_OF_PASSWORD = 3
_OPENING = "\"' :=>\t"
# Printable ASCII without quotes, comma, semicolon, brackets and braces.
_VALUE = r"!#-&*+\--:=?-Z^-z|~"
_PLACEHOLDERS = ("your", "example", "placeholder", "changeme", "environ", "getenv", "process.env")


def _bits_per_char(text: str) -> float:
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


def _num_kinds(text: str) -> int:
    kinds = (str.islower, str.isupper, str.isdigit)
    found = sum(any(kind(char) for char in text) for kind in kinds)
    return found + any(not char.isalnum() for char in text)


def check_assigned_secret(candidate: str) -> tuple[int, int] | None:
    """Return the span of the value if it is random enough and not a stand-in."""
    separator = min(at for at in map(candidate.find, ":=") if at >= 0)
    value = candidate[separator:].lstrip(_OPENING)
    start = len(candidate) - len(value)
    if any(word in value.lower() for word in _PLACEHOLDERS):
        return None
    has_digit = any(char.isdigit() for char in value)
    # Names in source code mix cases and dots too, but are not quoted and called a password.
    is_quoted = candidate[:start].rstrip(" ").endswith(("'", '"'))
    is_password = is_quoted and candidate.lower().startswith(("pass", "pwd"))
    min_kinds = _MIN_KINDS if has_digit else _MIN_KINDS_OF_PASSWORD
    is_random = _bits_per_char(value) >= _MIN_BITS_PER_CHAR and _num_kinds(value) >= min_kinds
    if not (is_random and (has_digit or is_password)):
        return None
    return start, len(candidate)


ASSIGNED_SECRET = Rule(
    "secret.assigned",
    Seq(
        Either(
            words("password", "passwd", "pwd", "passphrase", ignores_case=True),
            Seq(
                maybe(
                    Seq(
                        words(
                            "api", "access", "auth", "client", "secret", "private",
                            ignores_case=True,
                        ),
                        Chars(r"_\- ", 0, 1),
                    )
                ),
                words("key", "token", "secret", ignores_case=True),
            ),
        ),
        Chars("\"' ", 0, 3),
        Chars(":="),
        Chars(_OPENING, 0, 4),
        Chars(_VALUE, 10, 90),
    ),
    check=check_assigned_secret,
    not_after="A-Za-z0-9",
    score=0.7,
)  # fmt: skip
