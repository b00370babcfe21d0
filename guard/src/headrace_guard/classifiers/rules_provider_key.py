"""Keys of well-known providers: each has a prefix of its own, so no guess is needed."""

from headrace_guard.classifiers.pattern import ENDLESS, Chars, Edge, Seq, Text, maybe, words
from headrace_guard.classifiers.rule import Rule

_ALNUM = "A-Za-z0-9"
_TOKEN = r"A-Za-z0-9_\-"  # noqa: S105 - a character class

AWS_ACCESS_KEY = Rule(
    "secret.aws_access_key",
    Seq(words("AKIA", "ASIA", "ABIA", "ACCA"), Chars("A-Z0-9", 16), Edge()),
)
AWS_SECRET_KEY = Rule(
    "secret.aws_secret_key",
    Seq(
        words("aws_secret_access_key", "secretaccesskey", ignores_case=True),
        Chars("\"' :=", 1, 8),
        Chars("A-Za-z0-9/+", 40),
        maybe(Chars("\"'")),
    ),
)
GITHUB_TOKEN = Rule(
    "secret.github_token",
    Seq(
        words("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        Chars("A-Za-z0-9_", 30, ENDLESS),
    ),
)
SLACK_TOKEN = Rule(
    "secret.slack_token",
    Seq(words("xoxb-", "xoxa-", "xoxp-", "xoxr-", "xoxs-", "xapp-"), Chars(_TOKEN, 20, ENDLESS)),
)
# OpenAI, Anthropic and those who copied the scheme.
SK_KEY = Rule(
    "secret.openai_key",
    Seq(
        Text("sk-"),
        maybe(words("proj-", "svcacct-", "admin-", "ant-", "or-")),
        Chars(_TOKEN, 32, ENDLESS),
    ),
    not_after=_TOKEN,
)
STRIPE_KEY = Rule(
    "secret.stripe_key",
    Seq(
        words("sk_live_", "rk_live_", "sk_test_", "rk_test_", "whsec_"),
        Chars(_ALNUM, 16, ENDLESS),
    ),
)
GOOGLE_KEY = Rule(
    "secret.google_key",
    Seq(Text("AIza"), Chars(_TOKEN, 35, 40)),
)
GOOGLE_OAUTH = Rule(
    "secret.google_oauth_token",
    Seq(Text("ya29."), Chars(_TOKEN, 20, ENDLESS)),
)

PROVIDER_KEYS = (
    AWS_ACCESS_KEY,
    AWS_SECRET_KEY,
    GITHUB_TOKEN,
    SLACK_TOKEN,
    SK_KEY,
    STRIPE_KEY,
    GOOGLE_KEY,
    GOOGLE_OAUTH,
)
