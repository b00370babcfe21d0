"""National identity numbers whose format or check digit is telling enough to go by."""

from collections.abc import Callable

from stdnum.br import cpf
from stdnum.es import dni
from stdnum.fr import nir
from stdnum.in_ import aadhaar
from stdnum.it import codicefiscale
from stdnum.us import ssn

from headrace_guard.classifiers.pattern import Chars, Edge, Repeat, Seq, Text, maybe, words
from headrace_guard.classifiers.rule import Check, Rule

_NUMBER_PART = r"A-Za-z0-9_.\-"


def _all_or_nothing(is_valid: Callable[[str], bool]) -> Check:
    return lambda candidate: (0, len(candidate)) if is_valid(candidate) else None


def _check_aadhaar(candidate: str) -> tuple[int, int] | None:
    start = next(at for at, char in enumerate(candidate) if char.isdigit())
    return (start, len(candidate)) if aadhaar.is_valid(candidate[start:]) else None


# Area 000, 666 and 9xx, group 00 and serial 0000 were never given out; stdnum knows.
US_SSN = Rule(
    "pii.us_ssn",
    Seq(
        Chars("0-9", 3),
        Text("-"),
        Chars("0-9", 2),
        Text("-"),
        Chars("0-9", 4),
        Edge(),
    ),
    check=_all_or_nothing(ssn.is_valid),
    not_after=_NUMBER_PART,
)
ES_DNI = Rule(
    "pii.es_dni",
    Seq(Chars("0-9", 8), maybe(Text("-")), Chars("A-Za-z"), Edge()),
    check=_all_or_nothing(dni.is_valid),
    not_after=_NUMBER_PART,
)
IT_CODICE_FISCALE = Rule(
    "pii.it_codice_fiscale",
    Seq(
        Chars("A-Za-z", 6),
        Chars("0-9LMNPQRSTUVlmnpqrstuv", 2),
        Chars("A-Za-z"),
        Chars("0-9LMNPQRSTUVlmnpqrstuv", 2),
        Chars("A-Za-z"),
        Chars("0-9LMNPQRSTUVlmnpqrstuv", 3),
        Chars("A-Za-z"),
        Edge(),
    ),
    check=_all_or_nothing(codicefiscale.is_valid),
)
BR_CPF = Rule(
    "pii.br_cpf",
    Seq(Repeat(Seq(Chars("0-9", 3), Chars(r".\-")), 3, 3), Chars("0-9", 2), Edge()),
    check=_all_or_nothing(cpf.is_valid),
    not_after=_NUMBER_PART,
)
# Three groups of four are too common: the number counts only where it is called by its name.
IN_AADHAAR = Rule(
    "pii.in_aadhaar",
    Seq(
        words("aadhaar", "aadhar", "uidai", ignores_case=True),
        Chars("A-Za-z .:#-", 0, 20),
        Repeat(Seq(Chars("0-9", 4), Chars(r" \-", 0, 1)), 2, 2),
        Chars("0-9", 4),
        Edge(),
    ),
    check=_check_aadhaar,
)
FR_NIR = Rule(
    "pii.fr_nir",
    Seq(
        Chars("12"),
        Repeat(Seq(maybe(Text(" ")), Chars("0-9ABab")), 14, 14),
        Edge(),
    ),
    check=_all_or_nothing(nir.is_valid),
    not_after=_NUMBER_PART,
)

NATIONAL_IDS = (US_SSN, ES_DNI, IT_CODICE_FISCALE, BR_CPF, IN_AADHAAR, FR_NIR)
