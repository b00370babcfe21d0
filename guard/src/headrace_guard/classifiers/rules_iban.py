"""International bank account numbers: country length and the mod-97 check (ISO 13616)."""

from headrace_guard.classifiers.pattern import Chars, Edge, Repeat, Seq, Text, maybe
from headrace_guard.classifiers.rule import Rule

# Country and length, from the IBAN registry, release 99.
_REGISTRY = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 "
    "DK18 DO28 EE20 EG29 ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 "
    "IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 "
    "MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24 RS22 RU33 SA24 "
    "SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30 "
)
_LENGTHS = {entry[:2]: int(entry[2:]) for entry in _REGISTRY.split()}


def check_iban(candidate: str) -> tuple[int, int] | None:
    """Return the span of the account number that *candidate* begins with."""
    wanted = _LENGTHS.get(candidate[:2].upper())
    if wanted is None:
        return None
    compact, end = "", 0
    while len(compact) < wanted and end < len(candidate):
        compact += candidate[end] if candidate[end] != " " else ""
        end += 1
    goes_on = end < len(candidate) and candidate[end] != " "
    if len(compact) < wanted or goes_on:
        return None
    turned = compact[4:] + compact[:4]
    number = int("".join(str(int(char, 36)) for char in turned))
    return (0, end) if number % 97 == 1 else None


IBAN = Rule(
    "pii.iban",
    Seq(
        Chars("A-Za-z", 2),
        Chars("0-9", 2),
        Repeat(Seq(maybe(Text(" ")), Chars("A-Za-z0-9")), 11, 30),
        Edge(),
    ),
    check=check_iban,
)
