"""What each rule finds, and the look-alikes that it leaves alone."""

import pytest

from headrace_guard.classifiers.catalogue import CATEGORIES, RULES
from headrace_guard.classifiers.rule import RuleSet
from headrace_guard.normalise import Window

RULE_SET = RuleSet(RULES)
_A24 = "Ab3dEf6hIj9lMn2pQr5tUv8x"
# Built from parts, so that no scanner of repositories takes this file for a leak.
HITS = [
    ("pii.email", "write to jo.doe+x@mail.example.co.uk.", "jo.doe+x@mail.example.co.uk"),
    ("pii.phone", "call +49 30 1234567 now", "+49 30 1234567"),
    ("pii.phone", "call (212) 555-2368 now", "(212) 555-2368"),
    ("pii.phone", "call 1-212-555-2368", "1-212-555-2368"),
    ("pii.card", "card 4111 1111 1111 1111 12/27", "4111 1111 1111 1111"),
    ("pii.card", "card 3782-822463-10005", "3782-822463-10005"),
    ("pii.card", "no 7 5555555555554444", "5555555555554444"),
    ("pii.iban", "to DE89 3704 0044 0532 0130 00 IS MINE", "DE89 3704 0044 0532 0130 00"),
    ("pii.iban", "to GB82WEST12345698765432.", "GB82WEST12345698765432"),
    ("pii.us_ssn", "ssn 536-22-1234.", "536-22-1234"),
    ("pii.es_dni", "DNI 54362315K", "54362315K"),
    ("pii.it_codice_fiscale", "cf RCCMNL83S18D969H", "RCCMNL83S18D969H"),
    ("pii.br_cpf", "cpf 390.533.447-05", "390.533.447-05"),
    ("pii.in_aadhaar", "Aadhaar no: 2341 2341 2346", "2341 2341 2346"),
    ("pii.fr_nir", "nir 2 95 10 99 126 111 93", "2 95 10 99 126 111 93"),
    ("pii.es_nie", "NIE X-2482300-W", "X-2482300-W"),
    ("pii.cn_resident_id", "id 360426199101010071", "360426199101010071"),
    ("pii.se_personnummer", "pnr 880320-0016.", "880320-0016"),
    ("pii.gb_nino", "NI AB 12 34 56 C", "AB 12 34 56 C"),
    ("pii.ca_sin", "my SIN is 123 456 782", "123 456 782"),
    ("pii.de_tax_id", "Steuer-ID: 36 574 261 809", "36 574 261 809"),
    ("pii.pl_pesel", "PESEL 44051401359", "44051401359"),
    ("pii.nl_bsn", "BSN: 111222333", "111222333"),
    ("pii.gb_nhs", "NHS number 943 476 5870", "943 476 5870"),
    ("pii.address", "She lives at 221B Baker Street now", "221B Baker Street"),
    ("pii.address", "send to 1600 Elm Grove Ave, Apt 4, Springfield, IL 62704.",
     "1600 Elm Grove Ave, Apt 4, Springfield, IL 62704"),
    ("pii.address", "My address: 10 Mill Lane, York", "10 Mill Lane"),
    ("pii.address", "10 Mill Lane, York YO1 7PR", "10 Mill Lane, York YO1 7PR"),
    ("pii.address", "Wohnt: Lindenstr. 12a, 10115 Berlin", "Lindenstr. 12a, 10115 Berlin"),
    ("pii.address", "Lindenstraße 12, 10115 Berlin", "Lindenstraße 12, 10115 Berlin"),
    ("pii.ip_address", "from 203.0.113.9.", "203.0.113.9"),
    ("pii.ip_address", "from 2001:db8::8a2e:370:7334 ok", "2001:db8::8a2e:370:7334"),
    ("secret.aws_access_key", "AKIA" + "IOSFODNN7EXAMPLE", None),
    ("secret.aws_secret_key", "aws_secret_access_key = " + _A24 + _A24[:16], None),
    ("secret.github_token", "ghp_" + _A24 + _A24[:12], None),
    ("secret.slack_token", "xoxb-" + "123456789012-" + _A24, None),
    ("secret.openai_key", "sk-" + "proj-" + _A24 * 2, None),
    ("secret.stripe_key", "sk_live_" + _A24, None),
    ("secret.google_key", "AIza" + _A24 + _A24[:11], None),
    ("secret.google_oauth_token", "ya29." + _A24, None),
    ("secret.private_key", "-----BEGIN PRIVATE " + "KEY-----\nb3\n-----END PRIVATE KEY-----", None),
    ("secret.jwt", "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", None),
    ("secret.assigned", 'password = "q8!fLs92xQw"', "q8!fLs92xQw"),
    ("secret.assigned", "passwd: 'kfLs-Xzqw!Wb'", "kfLs-Xzqw!Wb"),
    ("secret.assigned", "API_KEY: 9f8e7d6c5b4a3f2e", "9f8e7d6c5b4a3f2e"),
]  # fmt: skip
MISSES = [
    "the price is 1234 5678 9012 3456",  # no issuer
    "card 4111 1111 1111 1112",  # Luhn
    "card 3012 3456 7890 1",  # too short for its issuer
    "in 1998 Wall Street fell, 5 Fleet Street papers closed",
    "the sin of 046 454 287 men, bsn 111222334, a pesel of 44051401358",
    "AB 12 34 56 E, GB 12 34 56 C, 880320-0017, 360426199101010072",
    "order 4111111111111111222",
    "DE88 3704 0044 0532 0130 00",  # mod 97
    "ssn 666-22-1234, 536-00-1234, 900-22-1234",
    "room 123-45-6",
    "@mention a@b and user@host",
    "version 1.2.3.4.5, at 12:30:45, 127.0.0.1, 999.1.1.1",
    "call 555-2368 or 112",
    "2024-01-15 10:20:30",
    "AKIA is a prefix, so are ghp_ and sk-",
    "sk-learn and sk-dictionary-attack",
    'password = "your_password_1"; token = os.environ["TOKEN"]',
    "key: value, secret = hunter",
    "key = SomeClass.method_name; token = Other.Thing_else",
    "-----BEGIN PUBLIC KEY-----",
    "3.14159265358979323846",
    "uuid 123e4567-e89b-12d3-a456-426614174000",
    "sha 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
]


@pytest.mark.parametrize(("category", "text", "value"), HITS)
def test_finds(category: str, text: str, value: str | None) -> None:
    """The span is the value itself, nothing around it."""
    found = [
        (match.category, text[match.start : match.end]) for match in RULE_SET.find(Window(text))
    ]
    assert (category, value or text) in found


@pytest.mark.parametrize("text", MISSES)
def test_leaves_look_alikes_alone(text: str) -> None:
    """Check digits, issuers, lengths and context keep ordinary numbers out."""
    assert RULE_SET.find(Window(text)) == []


def test_every_category_has_a_sample() -> None:
    """A new rule comes with one."""
    assert {category for category, _, _ in HITS} | {"blocklist"} == CATEGORIES
