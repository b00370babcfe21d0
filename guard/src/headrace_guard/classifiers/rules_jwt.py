"""JSON Web Tokens (RFC 7519): header and payload begin with '{"' in base64url, which is "eyJ"."""

from headrace_guard.classifiers.pattern import ENDLESS, Chars, Seq, Text, maybe
from headrace_guard.classifiers.rule import Rule

_BASE64URL = r"A-Za-z0-9_\-"

JWT = Rule(
    "secret.jwt",
    Seq(
        Text("eyJ"),
        Chars(_BASE64URL, 8, ENDLESS),
        Text(".eyJ"),
        Chars(_BASE64URL, 8, ENDLESS),
        maybe(Seq(Text("."), Chars(_BASE64URL, 0, ENDLESS))),
    ),
    not_after=_BASE64URL,
)
