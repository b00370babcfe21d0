"""Private keys in PEM or OpenPGP armour. The first line is enough; the rest is taken along."""

from headrace_guard.classifiers.pattern import ENDLESS, Chars, Seq, Text, maybe
from headrace_guard.classifiers.rule import Rule

PRIVATE_KEY = Rule(
    "secret.private_key",
    Seq(
        Text("-----BEGIN "),
        Chars("A-Z0-9 ", 0, 24),
        Text("PRIVATE KEY"),
        maybe(Text(" BLOCK")),
        Text("-----"),
        # Backslash and n: keys pasted out of JSON or source code.
        Chars(r"A-Za-z0-9+/=:,.()\\\s", 0, ENDLESS),
        maybe(Seq(Text("-----END "), Chars("A-Z0-9 ", 0, 40), Text("-----"))),
    ),
    not_after="-",
)
