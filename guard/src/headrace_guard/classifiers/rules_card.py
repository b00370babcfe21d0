"""Payment cards: issuer prefix, length of that issuer, Luhn's check digit (ISO/IEC 7812)."""

from stdnum import luhn

from headrace_guard.classifiers.pattern import Chars, Edge, Repeat, Seq, maybe
from headrace_guard.classifiers.rule import Rule

_MIN_DIGITS, _MAX_DIGITS = 13, 19
# First and last issuer prefix (of equal length) and the lengths in use.
_ISSUERS: tuple[tuple[str, str, frozenset[int]], ...] = (
    ("4", "4", frozenset({13, 16, 19})),  # Visa
    ("51", "55", frozenset({16})),  # Mastercard
    ("2221", "2720", frozenset({16})),  # Mastercard
    # American Express; with 16 digits only in made-up numbers, which people paste all the same.
    ("34", "34", frozenset({15, 16})),
    ("37", "37", frozenset({15, 16})),
    ("6011", "6011", frozenset(range(16, 20))),  # Discover
    ("644", "659", frozenset(range(16, 20))),
    ("300", "305", frozenset(range(14, 20))),  # Diners Club
    ("36", "36", frozenset(range(14, 20))),
    ("38", "39", frozenset(range(16, 20))),
    ("3528", "3589", frozenset(range(16, 20))),  # JCB
    ("62", "62", frozenset(range(16, 20))),  # UnionPay
    ("5018", "5018", frozenset(range(16, 20))),  # Maestro; shorter ones are history
    ("5020", "5020", frozenset(range(16, 20))),
    ("5038", "5038", frozenset(range(16, 20))),
    ("5893", "5893", frozenset(range(16, 20))),
    ("6304", "6304", frozenset(range(16, 20))),
    ("6759", "6763", frozenset(range(16, 20))),
)


def _lengths_by_prefix() -> dict[str, set[int]]:
    lengths: dict[str, set[int]] = {}
    for first, last, allowed in _ISSUERS:
        for prefix in range(int(first.ljust(4, "0")), int(last.ljust(4, "9")) + 1):
            lengths.setdefault(str(prefix), set()).update(allowed)
    return lengths


# The first four digits say who issued a card and how long its number is.
_LENGTHS = _lengths_by_prefix()


def check_card(candidate: str) -> tuple[int, int] | None:
    """Find the longest card number that *candidate* begins with and that ends at a group's end."""
    digits = candidate.replace(" ", "").replace("-", "")
    lengths = _LENGTHS.get(digits[:4])
    if lengths is None:
        return None
    for end in range(len(candidate), _MIN_DIGITS - 1, -1):
        goes_on = end < len(candidate) and candidate[end].isdigit()
        if goes_on or not candidate[end - 1].isdigit():
            continue
        number = candidate[:end].replace(" ", "").replace("-", "")
        if len(number) in lengths and luhn.is_valid(number):
            return 0, end
    return None


CARD = Rule(
    "pii.card",
    Seq(
        Chars("0-9"),
        Repeat(
            Seq(maybe(Chars(r" \-")), Chars("0-9")),
            _MIN_DIGITS - 1,
            _MAX_DIGITS - 1,
        ),
        Edge(),
    ),
    check=check_card,
    not_after="A-Za-z0-9_.",
)
