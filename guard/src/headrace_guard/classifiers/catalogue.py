"""All rules of this build and the categories a policy may name."""

from headrace_guard.classifiers import blocklist
from headrace_guard.classifiers.rule import Rule
from headrace_guard.classifiers.rules_address import ADDRESS
from headrace_guard.classifiers.rules_assigned_secret import ASSIGNED_SECRET
from headrace_guard.classifiers.rules_card import CARD
from headrace_guard.classifiers.rules_email import EMAIL
from headrace_guard.classifiers.rules_iban import IBAN
from headrace_guard.classifiers.rules_ip import IP_ADDRESS
from headrace_guard.classifiers.rules_jwt import JWT
from headrace_guard.classifiers.rules_national_id import NATIONAL_IDS
from headrace_guard.classifiers.rules_phone import PHONE
from headrace_guard.classifiers.rules_private_key import PRIVATE_KEY
from headrace_guard.classifiers.rules_provider_key import PROVIDER_KEYS

RULES: tuple[Rule, ...] = (
    EMAIL,
    PHONE,
    CARD,
    IBAN,
    IP_ADDRESS,
    ADDRESS,
    *NATIONAL_IDS,
    *PROVIDER_KEYS,
    PRIVATE_KEY,
    JWT,
    ASSIGNED_SECRET,
)
CATEGORIES: frozenset[str] = frozenset({blocklist.CATEGORY, *(rule.category for rule in RULES)})
# Part of every policy version: changes with the detectors.
DETECTORS_VERSION = "rules/4"
