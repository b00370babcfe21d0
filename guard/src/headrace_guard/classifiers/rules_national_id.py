"""National identity numbers whose format or check digit is telling enough to go by."""

from collections.abc import Callable

from stdnum.br import cpf
from stdnum.ca import sin
from stdnum.cn import ric
from stdnum.de import idnr
from stdnum.es import dni, nie
from stdnum.fr import nir
from stdnum.gb import nhs
from stdnum.in_ import aadhaar
from stdnum.it import codicefiscale
from stdnum.nl import bsn
from stdnum.pl import pesel
from stdnum.se import personnummer
from stdnum.us import ssn

from headrace_guard.classifiers.pattern import Chars, Edge, Pattern, Repeat, Seq, Text, maybe, words
from headrace_guard.classifiers.rule import Check, Rule

_GAP = Chars(r" \-", 0, 1)
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

ES_NIE = Rule(
    "pii.es_nie",
    Seq(
        Chars("XYZxyz"),
        maybe(Text("-")),
        Chars("0-9", 7),
        maybe(Text("-")),
        Chars("A-Za-z"),
        Edge(),
    ),
    check=_all_or_nothing(nie.is_valid),
    not_after=_NUMBER_PART,
)
# Region, date of birth and check digit: telling enough without a name.
CN_RESIDENT = Rule(
    "pii.cn_resident_id",
    Seq(Chars("1-9"), Chars("0-9", 16), Chars("0-9Xx"), Edge()),
    check=_all_or_nothing(ric.is_valid),
    not_after=_NUMBER_PART,
)
SE_PERSONNUMMER = Rule(
    "pii.se_personnummer",
    Seq(Chars("0-9", 6), maybe(Chars("0-9", 2)), Chars(r"+\-"), Chars("0-9", 4), Edge()),
    check=_all_or_nothing(personnummer.is_valid),
    not_after=_NUMBER_PART,
)
# Two letters, six digits, a letter from A to D; some pairs were never given out. No check digit.
GB_NINO = Rule(
    "pii.gb_nino",
    Seq(
        Chars("A-CEGHJ-PR-TW-Z"),
        Chars("A-CEGHJ-NPR-TW-Z"),
        Repeat(Seq(maybe(Text(" ")), Chars("0-9", 2)), 3, 3),
        maybe(Text(" ")),
        Chars("A-D"),
        Edge(),
    ),
    check=lambda candidate: (
        None if candidate[:2] in {"BG", "GB", "KN", "NK", "NT", "TN", "ZZ"} else (0, len(candidate))
    ),
    score=0.8,
)


def _named(
    category: str, names: tuple[str, ...], number: Pattern, is_valid: Callable[[str], bool]
) -> Rule:
    """Make the rule of a number that counts only where it is called by its name."""

    def check(candidate: str) -> tuple[int, int] | None:
        start = next(at for at, char in enumerate(candidate) if char.isdigit())
        return (start, len(candidate)) if is_valid(candidate[start:]) else None

    gap = Chars("A-Za-z .:#=()-", 0, 20)
    pattern = Seq(words(*names, ignores_case=True), gap, number, Edge())
    return Rule(category, pattern, check=check)


CA_SIN = _named(
    "pii.ca_sin",
    ("social insurance", "sin"),
    Seq(Chars("0-9", 3), _GAP, Chars("0-9", 3), _GAP, Chars("0-9", 3)),
    sin.is_valid,
)
DE_IDNR = _named(
    "pii.de_tax_id",
    ("steuer", "idnr", "tin", "tax id"),
    Seq(Chars("0-9", 2), Repeat(Seq(maybe(Text(" ")), Chars("0-9", 3)), 3, 3)),
    idnr.is_valid,
)
PL_PESEL = _named("pii.pl_pesel", ("pesel",), Chars("0-9", 11), pesel.is_valid)
NL_BSN = _named("pii.nl_bsn", ("bsn", "burgerservicenummer"), Chars("0-9", 9), bsn.is_valid)
GB_NHS = _named(
    "pii.gb_nhs",
    ("nhs",),
    Seq(Chars("0-9", 3), _GAP, Chars("0-9", 3), _GAP, Chars("0-9", 4)),
    nhs.is_valid,
)

NATIONAL_IDS = (
    US_SSN,
    ES_DNI,
    ES_NIE,
    IT_CODICE_FISCALE,
    BR_CPF,
    IN_AADHAAR,
    FR_NIR,
    CN_RESIDENT,
    SE_PERSONNUMMER,
    GB_NINO,
    CA_SIN,
    DE_IDNR,
    PL_PESEL,
    NL_BSN,
    GB_NHS,
)
